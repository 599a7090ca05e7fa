"""Where a classifier whose last part learns can be cut in two: what lies before the cut gives the same at every visit.

Legend: B batch, D feature width, G grid side of the feature map.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lacuna.basics.errors import UserError


class Cut:
    """A backbone in two: `rest(fixed(images))` is what it gives, or that pooled."""

    def __init__(self, name: str, backbone: nn.Module):
        self.name, self.backbone = name, backbone

    def fixed(self, images: torch.Tensor) -> torch.Tensor:
        """Normalised images [B, 3, H, W] to what is kept of them, [B, …]."""
        return self.backbone(images)

    def rest(self, kept: torch.Tensor) -> torch.Tensor:
        """To the feature map [B, D, G, G], or to its mean over cells [B, D]."""
        return kept

    def digest(self) -> str:
        """Of the weights and statistics of the fixed part."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.backbone.state_dict().items()):
            if not self.learns(name):
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def learns(self, name: str) -> bool:
        """Whether a tensor of the backbone lies behind the cut."""
        return False


class PooledCut(Cut):
    """Behind the mean over the cells: all that the logits of a linear head look at."""

    def fixed(self, images: torch.Tensor) -> torch.Tensor:
        features = self.backbone(images)
        return features.mean((2, 3)) if features.ndim == 4 else features


class LayerCut(Cut):
    """Before a layer, from which on one follows the other."""

    def __init__(self, name: str, backbone: nn.Module, layers: list[tuple[str, nn.Module]]):
        super().__init__(name, backbone)
        self.names, self.layers = [name for name, _ in layers], [layer for _, layer in layers]

    def fixed(self, images: torch.Tensor) -> torch.Tensor:
        def reached(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            raise _Reached(inputs[0])

        hook = self.layers[0].register_forward_pre_hook(reached)
        try:
            self.backbone(images)
        except _Reached as found:
            return found.tensor
        finally:
            hook.remove()
        raise AssertionError("the layer after the cut was not called")

    def rest(self, kept: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            kept = layer(kept)
        return _laid_out(self.backbone)(kept)

    def learns(self, name: str) -> bool:
        return any(name.startswith(f"{layer}.") for layer in self.names)


class _Reached(Exception):
    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.tensor = tensor


def find_cut(backbone: nn.Module, names: dict[str, str], learning: set[str], maps: bool, size: int, key: str) -> Cut:
    """The last place that nothing learns before. `learning`: parts of the backbone that do; `maps`: whether the
    features' places matter; `names`: the publisher's; `key` names the setting that asks for it."""
    if not learning:
        return Cut("feature maps", backbone) if maps else PooledCut("pooled features", backbone)
    chain = _calls(backbone, size)
    first = next((i for i, call in enumerate(chain) if _has(call, learning)), None)
    weights = {name for name, _ in backbone.named_parameters() if name in learning}
    if first is not None:
        found = chain[first:]
        cut = LayerCut(f"the input of {names[found[0].name]}", backbone, [(call.name, call.layer) for call in found])
        left_out = [name for name in weights if not cut.learns(name)]
        if first and not left_out and _follow(found, backbone):
            return cut
    raise UserError(f"{key}: what learns must lie at the end of the backbone, behind something that does not, and its "
                    "layers must follow one after the other. Train the head alone or the last blocks (trainable: head, "
                    "or a list such as [layer4]), or leave the cache out.")


@dataclass(frozen=True)
class _Call:
    name: str
    layer: nn.Module
    inputs: tuple
    output: torch.Tensor
    whole: torch.Tensor  # what the backbone made of the output of its last layer


def _calls(backbone: nn.Module, size: int) -> list[_Call]:
    """Every layer that a blank image goes through, in order."""
    found: list[tuple[str, nn.Module, tuple, torch.Tensor]] = []
    hooks = [layer.register_forward_hook(lambda layer, inputs, output, name=name: found.append((name, layer, inputs,
                                                                                               output)))
             for name, layer in _layers(backbone)]
    device = next(backbone.parameters()).device
    mode = {module: module.training for module in backbone.modules()}
    backbone.eval()
    try:
        with torch.no_grad():
            whole = backbone(torch.zeros(1, 3, size, size, device=device))
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in mode.items():
            module.training = training
    return [_Call(*call, whole) for call in found]


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Layers that may follow one another: sequences and a transformer's wrapper are opened."""
    for name, child in module.named_children():
        opened = type(child).forward is nn.Sequential.forward or (not path and name == "body")
        if opened:
            yield from _layers(child, f"{path}{name}.")
        else:
            yield path + name, child


def _has(call: _Call, learning: set[str]) -> bool:
    return any(f"{call.name}.{name}" in learning for name, _ in call.layer.named_parameters())


def _follow(calls: list[_Call], backbone: nn.Module) -> bool:
    """Whether each layer is called once, with what the one before it gave and nothing else, up to the end."""
    if len({call.name for call in calls}) < len(calls):
        return False
    joined = all(len(after.inputs) == 1 and after.inputs[0] is before.output
                 for before, after in itertools.pairwise(calls))
    return joined and torch.equal(_laid_out(backbone)(calls[-1].output), calls[-1].whole)


def _laid_out(backbone: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """How a transformer's tokens become a map; other backbones end with one."""
    return getattr(backbone, "laid_out", lambda out: out)
