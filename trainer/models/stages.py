"""A backbone in two stages, for heads that look at two of its maps: what enters its last stage, and what leaves it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.trainer.models.cuts import _calls, _follow, _laid_out
from lacuna.trainer.models.parts import learning


class Stages:
    def __init__(self, part: str, backbone: nn.Module, before: list[nn.Module], after: list[nn.Module]):
        self.part, self.backbone, self.before, self.after = part, backbone, before, after

    def first(self, images: torch.Tensor) -> torch.Tensor:
        """The earlier map [B, D', G', G'] of normalised images."""
        return _through(self.before, images)

    def second(self, earlier: torch.Tensor) -> torch.Tensor:
        """The last map [B, D, G, G]."""
        return _laid_out(self.backbone)(_through(self.after, earlier))


def _through(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def find_stages(backbone: nn.Module, names: dict[str, str], part: str, size: int, head: str) -> Stages:
    """`part`: the publisher's name of the layer that the second stage begins with."""
    if not part:
        raise UserError(f"model.head = {head!r} looks at two maps: set model.decoder.earlier to the part of the "
                        "backbone whose input is the earlier one, e.g. layer4 of a ResNet.")
    calls, wanted = _calls(backbone, size), learning(names, (part,))
    first = next((i for i, call in enumerate(calls) if any(f"{call.name}.{name}" in wanted for name, _ in
                                                           call.layer.named_parameters())), 0)
    if not first or not _follow(calls, backbone):
        raise UserError(f"model.decoder.earlier = {part!r}: no layer of the backbone that others come before, or its "
                        "layers do not follow one after the other. Use the name of a later part, or another backbone.")
    layers = [call.layer for call in calls]
    return Stages(part, backbone, layers[:first], layers[first:])
