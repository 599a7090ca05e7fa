"""Any method, and beside it AssetReg (NeurIPS 2025): predictions follow the running average of their group.

    loss + weight · mean over samples and classes of BCE(logits, average of the sample's group)
    average ← (1 − rate) · average + rate · p, once per step; p: the mean over the group's samples in the global batch
The averages start at Uniform(0.4, 0.6) (or group_start), 1 where a sample of the group has the class. (The authors'
code takes the last of several samples of a group in one batch, which depends on their order.)

Ownership: a group's samples lie in many shards and on many ranks, so the averages [groups, L] belong to no shard. Every
rank has them all; the step's predictions are gathered from all ranks, and every rank makes the same update. It takes
effect at the next step, also between micro-batches, so the number of ranks and pieces changes nothing. They are in the
checkpoint with the method's own class-level state; they cost 4 · groups · L bytes on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field
from lacuna.trainer.methods.all_ranks import rows_of_all_ranks
from lacuna.trainer.methods.base import EpochStart, LossTerms, Method, Needs, Outputs, Step
from lacuna.trainer.on_device.uploads import to_device

_START = 43  # keeps this use of the seed apart from others
_AVERAGES = "groups.averages"


class Grouped(Method):
    """A method with the term of its samples' groups; everything else is the method's own."""

    def __init__(self, method: Method, numbers: Sequence[np.ndarray], averages: torch.Tensor, weight: float,
                 rate: float):
        """`numbers`: of every shard's rows, their groups or -1; `averages` float32 [groups, L]."""
        super().__init__(method.settings, method.task)
        self.method, self.score = method, method.score  # type: ignore[misc]
        self.numbers, self.averages, self.weight, self.rate = numbers, averages, weight, rate
        self.step_seen = (-1, -1)
        self.coming: list[tuple[np.ndarray, torch.Tensor]] = []  # groups and predictions of the step under way

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        if (step.phase, step.number) != self.step_seen:
            self._update()
            self.step_seen = (step.phase, step.number)
        terms = self.method.loss(outputs, batch, step)
        places = zip(batch.shards, batch.rows, strict=True)
        own = np.array([self.numbers[shard][row] for shard, row in places], np.int64)
        self.averages = to_device(self.averages, outputs.logits.device)
        inside = to_device(torch.from_numpy(own >= 0), outputs.logits.device)
        before = self.averages[to_device(torch.from_numpy(own.clip(0)), outputs.logits.device)]
        follows = F.binary_cross_entropy_with_logits(outputs.logits, before, reduction="none").mean(1)
        terms.per_sample = terms.per_sample + self.weight * torch.where(inside, follows, 0.0)
        (said,) = rows_of_all_ranks(step.world, torch.sigmoid(outputs.logits.detach()))
        self.coming.append((np.concatenate(step.world.gather(own)), said))
        return terms

    def _update(self) -> None:
        if not self.coming:
            return
        groups = np.concatenate([part for part, _ in self.coming])
        said = torch.cat([part for _, part in self.coming])
        self.coming = []
        there = np.flatnonzero(groups >= 0)
        if not len(there):
            return
        found, own, counts = np.unique(groups[there], return_inverse=True, return_counts=True)
        rows, places, which, sizes = (to_device(torch.from_numpy(np.ascontiguousarray(values)), said.device)
                                      for values in (found, there, own, counts))
        # In float64 the order of a sum does not show: it depends on the ranks and the micro-batches.
        total = torch.zeros(len(found), said.shape[1], dtype=torch.float64, device=said.device)
        mean = total.index_add_(0, which, said[places].double()) / sizes[:, None]
        self.averages[rows] = ((1 - self.rate) * self.averages[rows].double() + self.rate * mean).float()

    def state(self) -> dict[str, torch.Tensor]:
        self._update()
        return {**self.method.state(), _AVERAGES: self.averages}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.coming, self.averages = [], state[_AVERAGES].clone()
        self.method.load_state({name: value for name, value in state.items() if name != _AVERAGES})

    # ---- as the method has it

    def needs(self) -> Needs:
        return self.method.needs()

    def fields(self) -> list[Field]:
        return self.method.fields()

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        return self.method.initial_rows(field, labels, shard)

    def initial_counts(self) -> dict[str, np.ndarray]:
        return self.method.initial_counts()

    def module(self) -> torch.nn.Module | None:
        return self.method.module()

    def begin_epoch(self, start: EpochStart) -> None:
        self.method.begin_epoch(start)

    def end_phase(self, steps: int) -> None:
        self.method.end_phase(steps)

    def complete_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.method.complete_loss(logits, labels)


def first_averages(groups: int, positives: Sequence[tuple[np.ndarray, np.ndarray]], classes: int, start: float | None,
                   seed: int) -> torch.Tensor:
    """float32 [groups, L]; `positives`: (groups, classes) of known positives, shard by shard."""
    generator = torch.Generator().manual_seed(mix(seed, _START) >> 1)
    averages = (torch.rand(groups, classes, generator=generator) * 0.2 + 0.4 if start is None
                else torch.full((groups, classes), start))
    for own, cls in positives:
        averages[own[own >= 0], cls[own >= 0]] = 1.0
    return averages
