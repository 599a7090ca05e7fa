"""Pooling of score maps by class-specific residual attention (CSRA, Zhu and Wu, ICCV 2021).

Legend: s a class's scores over the cells of the map, without its bias b.
    logit = mean of s + λ · Σ softmax(T · s) · s + b;   from T = 99 on the maximum of s instead of the weighted mean
The published head has no bias; ours is added once, so that it can start at the prior.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MAXIMUM = 99.0


@dataclass(frozen=True)
class Attention:
    weight: float  # λ
    temperature: float  # T

    def __call__(self, maps: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """[B, L] of maps [B, L, G, G] that have the bias [L] in every cell: the softmax does not see it."""
        cells = maps.flatten(2)
        if self.temperature >= _MAXIMUM:
            attended = cells.amax(2)
        else:
            attended = (torch.softmax(self.temperature * cells, 2) * cells).sum(2)
        return cells.mean(2) + self.weight * (attended - bias)
