"""Means of what a method reports about every sample: over the reporting interval and over the epoch.

A rank keeps sums; they are part of the checkpoint, so that a resumed run reports what an uninterrupted one does.
"""

from __future__ import annotations

import torch

from lacuna.trainer.world import World

_INTERVAL, _EPOCH = 0, 1


class RunningMeans:
    def __init__(self, device: torch.device):
        self.names: list[str] = []
        self.totals = torch.zeros(2, 1, dtype=torch.float64, device=device)  # samples, then one sum per name

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Values [B] by name, the same names at every step and on every rank."""
        if not values:
            return
        self.names = sorted(values)
        if self.totals.shape[1] == 1:
            self.totals = self.totals.new_zeros(2, 1 + len(values))
        sums = [values[name].detach().double().sum() for name in self.names]
        count = self.totals.new_full((), float(len(values[self.names[0]])))
        self.totals += torch.stack([count, *sums])

    def begin_epoch(self) -> None:
        self.totals[_EPOCH] = 0

    def interval(self, world: World) -> dict[str, float]:
        """Since the last call; a collective."""
        means = self._means(_INTERVAL, world)
        self.totals[_INTERVAL] = 0
        return means

    def epoch(self, world: World) -> dict[str, float]:
        return self._means(_EPOCH, world)

    def _means(self, which: int, world: World) -> dict[str, float]:
        if not self.names:
            return {}
        count, *sums = world.sum_counts(*self.totals[which].tolist())
        return {name: total / max(1.0, count) for name, total in zip(self.names, sums, strict=True)}

    def to_list(self) -> list[float]:
        return self.totals.flatten().tolist()

    def restore(self, flat: torch.Tensor) -> None:
        self.totals = flat.view(2, -1).to(self.totals.device, torch.float64)
