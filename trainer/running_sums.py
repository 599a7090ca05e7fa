"""Running sums of an epoch in progress; they are in the checkpoint, so that a resumed run logs the same numbers."""

from __future__ import annotations

import torch

from lacuna.trainer.running_means import RunningMeans
from lacuna.trainer.world import World


class RunningSums:
    """Losses are this rank's shares and stay on the device; counts are of all ranks."""

    def __init__(self, device: torch.device):
        self.interval_loss = torch.zeros((), dtype=torch.float64, device=device)  # since the last log line
        self.epoch_loss = torch.zeros_like(self.interval_loss)
        self.interval_steps = 0
        self.bad_samples = 0  # of the epoch
        self.means = RunningMeans(device)

    def begin_epoch(self) -> None:
        self.epoch_loss.zero_()
        self.bad_samples = 0
        self.means.begin_epoch()

    def add(self, loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        """After a step: this rank's share of the global loss, and what the method says about every sample."""
        self.interval_loss += loss
        self.epoch_loss += loss
        self.interval_steps += 1
        self.means.add(metrics)

    def interval(self, world: World) -> tuple[float, dict[str, float]]:
        """(mean loss, means of the method's values) since the last call; a collective."""
        loss = world.sum_counts(float(self.interval_loss))[0] / self.interval_steps
        self.interval_loss.zero_()
        self.interval_steps = 0
        return loss, self.means.interval(world)

    def epoch(self, world: World, steps: int) -> tuple[float, dict[str, float]]:
        return world.sum_counts(float(self.epoch_loss))[0] / max(1, steps), self.means.epoch(world)

    def to_dict(self) -> dict:
        return {"interval_loss": float(self.interval_loss), "epoch_loss": float(self.epoch_loss),
                "interval_steps": self.interval_steps, "bad_samples": self.bad_samples, "means": self.means.to_list()}

    def restore(self, parts: dict[str, dict], world: World) -> None:
        """Each rank its own part; with another number of ranks, rank 0 takes the total."""
        mine = list(parts.values())
        if len(parts) == world.size:
            mine = [parts[str(world.rank)]]
        elif not world.main:
            mine = []
        self.interval_loss.fill_(sum(part["interval_loss"] for part in mine))
        self.epoch_loss.fill_(sum(part["epoch_loss"] for part in mine))
        self.interval_steps, self.bad_samples = parts["0"]["interval_steps"], parts["0"]["bad_samples"]
        means = torch.tensor([part["means"] for part in mine], dtype=torch.float64).sum(0)
        self.means.restore(means if mine else torch.zeros(len(parts["0"]["means"]), dtype=torch.float64))
