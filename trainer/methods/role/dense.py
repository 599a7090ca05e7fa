"""ROLE's label estimators: what they have in common, and `dense`, the paper's, with one logit for every entry.

An estimator gives a batch's label logits φ [B, L] and learns from ∂ global loss / ∂φ.
Legend: B batch rows on this rank, L classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.state_store import Field, Given
from lacuna.trainer.methods.base import Masked, Outputs, Step, Task, unknown
from lacuna.trainer.methods.class_parameters import ClassParameters
from lacuna.trainer.methods.role.row_optimizer import RowOptimizer
from lacuna.trainer.on_device.uploads import to_device

KNOWN = 5.293305  # logit(0.995): where the estimate of an annotated class starts
SPREAD = 0.405465  # logit(0.6): others start uniform in ± this
CLAMP = 11.512915  # logit(1 − 1e-5): the hand-over between phases goes through a clamped probability


@dataclass
class Estimate:
    phi: torch.Tensor  # float32 [B, L]
    start: torch.Tensor  # φ before the first step, [B, L]: travel is measured from here
    parts: Any = None  # what the estimator needs again when it learns


class Estimator:
    """`s` are ROLE's settings, `lr` gives the rows' learning rate in a phase."""

    def __init__(self, s: BaseModel, task: Task, lr: Callable[[int], float]):
        self.s: Any = s
        self.task, self.lr = task, lr
        self.learners: list[RowOptimizer | ClassParameters] = []

    def fields(self) -> list[Field]:
        return []

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} gives no rows of {field!r}")

    def read(self, outputs: Outputs, batch: Batch, step: Step) -> Estimate:
        raise NotImplementedError

    def learn(self, estimate: Estimate, gradient: torch.Tensor, step: Step) -> dict[str, torch.Tensor | Masked]:
        """One step with the gradient [B, L]; the new rows."""
        raise NotImplementedError

    def travel(self, estimate: Estimate, labels: torch.Tensor) -> torch.Tensor:
        """[B]: mean distance of a row's unknown entries from where they started."""
        return mean_where((estimate.phi - estimate.start).abs(), unknown(labels))

    def end_phase(self, steps: int) -> None:
        for part in self.learners:
            part.end_phase(steps)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value for part in self.learners for name, value in part.state().items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        for part in self.learners:
            part.load_state(state)


class Dense(Estimator):
    """State: φ of every entry with its moments."""

    def __init__(self, s, task, lr):
        super().__init__(s, task, lr)
        self.rows = RowOptimizer("phi", "phi", s.optimizer, lr, CLAMP)
        self.learners = [self.rows]

    def fields(self) -> list[Field]:
        return self.rows.fields(Field("phi", (self.task.classes,), self.s.phi_dtype, Given("role"),
                                      stochastic=self.s.phi_dtype == "float16"))

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        rows = np.arange(len(labels))
        phi = start_logits(self.task, np.full(len(rows), shard), rows)
        phi = np.where(labels == POSITIVE, KNOWN, phi)
        return np.where(labels == NEGATIVE, -KNOWN, phi).astype(np.float32)

    def read(self, outputs: Outputs, batch: Batch, step: Step) -> Estimate:
        current = self.rows.read(step)
        start = start_logits(self.task, batch.shards, batch.rows)
        return Estimate(current.values, to_device(start, current.values.device, torch.float32), current)

    def learn(self, estimate: Estimate, gradient: torch.Tensor, step: Step) -> dict[str, torch.Tensor | Masked]:
        return self.rows.updated(estimate.parts, gradient, step)


def start_logits(task: Task, shards: np.ndarray, rows: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
    """Where unknown entries (of all classes, or of columns [B, q]) start: uniform in ± SPREAD, by hash."""
    if columns is None:
        columns = np.arange(task.classes)[None]
    return (2 * row_draws(task.seed, shards, rows[:, None] * task.classes + columns) - 1) * SPREAD


def row_draws(seed: int, shards: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """float64 [B, q] in [0, 1): a draw for every number of a shard."""
    draws = np.empty(numbers.shape)
    for shard in np.unique(shards):
        here = shards == shard
        draws[here] = uniform_array(mix(seed, int(shard)), numbers[here])
    return draws


def mean_where(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B]: mean over the marked entries of a row, 0 if it has none."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)
