"""Scob's head (Chen, Zhao and Li, IJCV 2023): a masked transformer over each of two maps, with a slow copy of both.

The cells of a map, projected to W channels, with learnt places of columns and rows added, go through two encoder layers
(8 heads, leaky ReLU) and a norm; their mean is half of the image's vector, and logits are linear in the vector. Where
an activation map says which cells show something, only those are attended to; the mean is over all of them.
Masks: the activation, 0 to 1 over its own range, is enlarged 32 times (bilinear) and brought to 0 to 1 again; a cell of
either map counts where its mean there is at least ½, but for the four corners.
The copy follows the transformers at a momentum; it only sees images for the contrast.
Legend: B batch, D and D' channels of the last and the earlier map, W width, L classes, G grid side, M cells.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from lacuna.trainer.config.sections import DecoderConfig
from lacuna.trainer.models.activation import grad_cam
from lacuna.trainer.models.decoders.base import Decoder, Layer, check_width

_WIDTH, _HEADS, _LAYERS, _FEEDFORWARD, _SIDES = 512, 8, 2, 2048, 50  # published
_ENLARGED, _LEAST, _SEEN = 32, 1e-7, 0.5


class MaskedTransformer(Decoder):
    def __init__(self, config: DecoderConfig, widths: tuple[int, int], classes: int):
        """`widths`: D and D'."""
        super().__init__()
        width = config.width or _WIDTH
        check_width(width, config.heads or _HEADS, "masked_transformer")
        self.width, self.queries = 2 * width, torch.empty(0, width)
        self.branches = nn.ModuleList(Branch(config, inputs, width) for inputs in widths)
        self.slow = copy.deepcopy(self.branches).requires_grad_(False)
        most = 1 / math.sqrt(self.width)
        self.weight = nn.Parameter(torch.empty(classes, self.width).uniform_(-most, most))
        self.bias = nn.Parameter(torch.empty(classes).uniform_(-most, most))

    def look(self, maps: tuple[torch.Tensor, torch.Tensor], of: torch.Tensor | None = None,
             activation: torch.Tensor | None = None, momentum: float | None = None) -> tuple[
                 torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Logits [B, L], the activation and vectors [B, 2W] of the last and the earlier map. With an activation
        [B, G, G], or that of the classes `of` [B], through masks: the vector is 0 where nothing counts. With a momentum
        by the copy, which moves first."""
        if of is not None:
            activation = self._activation(maps, of)
        if momentum is not None:
            self._follow(momentum)
        masks = [None, None] if activation is None else [seen_cells(activation, x.shape[-1]) for x in maps]
        vector = torch.cat([branch(x, mask) for branch, x, mask in
                            zip(self.slow if momentum is not None else self.branches, maps, masks, strict=True)], 1)
        if masks[0] is not None and masks[1] is not None:
            there = masks[0].flatten(1).any(1) & masks[1].flatten(1).any(1)
            vector = torch.where(there[:, None], vector, 0.0)
        return self.classify(vector), activation, vector

    def _activation(self, maps: tuple[torch.Tensor, torch.Tensor], of: torch.Tensor) -> torch.Tensor:
        """Where in the last map the classes were seen, by Grad-CAM++ of their probabilities, without dropout."""
        was_training = self.training
        self.eval()
        with torch.enable_grad():
            last = maps[0].detach().requires_grad_()
            scores = torch.sigmoid(self.look((last, maps[1].detach()))[0]).gather(1, of[:, None])
            found = grad_cam(last, scores)
        self.train(was_training)
        return found

    def classify(self, found: torch.Tensor) -> torch.Tensor:
        return F.linear(found, self.weight, self.bias).float()

    def _follow(self, momentum: float) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.branches.parameters(), strict=True):
                slow.lerp_(fast.detach(), 1 - momentum)


class Branch(nn.Module):
    def __init__(self, config: DecoderConfig, inputs: int, width: int):
        super().__init__()
        self.project = nn.Linear(inputs, width)
        self.columns, self.rows = (nn.Parameter(torch.rand(_SIDES, width // 2)) for _ in range(2))
        layer = Layer(width, config.heads or _HEADS, config.feedforward or _FEEDFORWARD, config.dropout, F.leaky_relu)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(config.layers or _LAYERS))  # they start alike
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """[B, W] of a map [B, D, G, G], of which only the cells `seen` [B, G, G] are attended to."""
        side = x.shape[-1]
        places = torch.cat([self.columns[:side].expand(side, -1, -1),
                            self.rows[:side, None].expand(-1, side, -1)], 2).flatten(0, 1)
        cells = self.project(x.flatten(2).transpose(1, 2)) + places
        ignored = None
        if seen is not None:
            inside = seen.flatten(1)
            ignored = ~inside & inside.any(1, keepdim=True)  # without any cell there is nothing to attend to
        for layer in self.layers:
            cells, _ = layer(cells, cells, cells, cells, ignored=ignored)
        return self.norm(cells).mean(1)


def seen_cells(activation: torch.Tensor, side: int) -> torch.Tensor:
    """bool [B, side, side] from activations [B, G, G] that are 0 or more."""
    large = F.interpolate(_scaled(activation.float())[:, None], scale_factor=_ENLARGED, mode="bilinear")
    seen = F.adaptive_avg_pool2d(_scaled(large), side)[:, 0] >= _SEEN
    inner = torch.ones(side, side, dtype=torch.bool, device=seen.device)
    inner[0, 0] = inner[0, -1] = inner[-1, 0] = inner[-1, -1] = False
    return seen & inner


def _scaled(x: torch.Tensor) -> torch.Tensor:
    """Every image's from 0 to 1."""
    low = x.flatten(1).amin(1).view(-1, *[1] * (x.ndim - 1))
    above = x - low
    return above / (_LEAST + above.flatten(1).amax(1).view(low.shape))
