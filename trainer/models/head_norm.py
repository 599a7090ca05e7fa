"""What enters the head, brought to one length: c·(x/‖x‖ − mean), with mean and c measured once and then fixed.

Long vectors are mostly images with much in them, not images that are surer of a class; without their lengths a linear
head ranks better. c gives the result the spread that the centred raw vectors had, so that learning rates and weight
decay keep their meaning. The factor c/‖x‖ belongs to an image, not to a cell of its feature map, so score maps still
average to the logits. Legend: B batch, D width of what enters the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_TINY = 1e-12  # a vector of zeros stays one


class HeadNorm(nn.Module):
    mean: torch.Tensor  # [D], of x/‖x‖
    scale: torch.Tensor  # [], c; 0 until it is measured

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.zeros(()))

    def factor(self, pooled: torch.Tensor) -> torch.Tensor:
        """[B, 1]: c/‖x‖ of pooled vectors [B, D]."""
        return self.scale / pooled.float().norm(dim=1, keepdim=True).clamp(min=_TINY)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Vectors [B, …, D], each image with its own factor [B, 1]."""
        factor = factor.view(-1, *[1] * (x.ndim - 1))
        return x * factor.to(x.dtype) - (self.scale * self.mean).to(x.dtype)

    def take(self, sums: Sums) -> None:
        mean, scale = sums.result()
        self.mean.copy_(mean)
        self.scale.fill_(scale)


@dataclass
class Sums:
    """Of all vectors seen, float64 on the host: one vector of 2·D + 3 numbers that ranks can add up."""

    width: int
    flat: torch.Tensor

    @classmethod
    def none(cls, width: int) -> Sums:
        return cls(width, torch.zeros(2 * width + 3, dtype=torch.float64))

    def add(self, pooled: torch.Tensor) -> None:
        x = pooled.double().cpu()
        length = x.norm(dim=1, keepdim=True)
        unit = x / length.clamp(min=_TINY)
        counts = torch.tensor([len(x), length.square().sum(), unit.square().sum()], dtype=torch.float64)
        self.flat += torch.cat([counts, x.sum(0), unit.sum(0)])

    def result(self) -> tuple[torch.Tensor, float]:
        """(mean of x/‖x‖, c): the mean squared length of c·(x/‖x‖ − mean) is that of x − its mean."""
        means = self.flat[1:] / self.flat[0].clamp(min=1)
        squares, unit_squares = means[:2]
        x, unit = means[2:].split(self.width)
        raw_spread, unit_spread = squares - x.square().sum(), unit_squares - unit.square().sum()
        return unit.float(), float((raw_spread / unit_spread.clamp(min=_TINY)).clamp(min=0).sqrt())
