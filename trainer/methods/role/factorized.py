"""ROLE's label estimator `factorized`: φ_ni = U_n·V_i + b_i, r numbers per sample instead of L.

U_n is state of the sample (with its moments); V and b are shared by all samples and live in the checkpoint. There is
no logit of a single entry that could start at its annotation: annotated entries are held by their terms of the loss.
The factors start as draws whose products spread like the logits of `dense`; b starts at 0. At a phase's hand-over the
factors go on as they are (a product cannot be clamped), with new moments. Legend: B rows, L classes, r rank.
"""

from __future__ import annotations

import numpy as np
import torch

from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field, Given
from lacuna.trainer.methods.base import Masked, Outputs, Step
from lacuna.trainer.methods.class_parameters import ClassParameters
from lacuna.trainer.methods.role.dense import SPREAD, Estimate, Estimator, row_draws
from lacuna.trainer.methods.role.row_optimizer import RowOptimizer
from lacuna.trainer.on_device.uploads import to_device

_CLASS_FACTORS = 0x56  # tells the draws of V from those of U


class Factorized(Estimator):
    """State: U_n and its moments; V and b for all."""

    def __init__(self, s, task, lr):
        super().__init__(s, task, lr)
        # Var Σ u·v = r·(a²/3)² shall be that of a uniform draw in ± SPREAD, SPREAD²/3.
        self.scale = (3 * SPREAD**2 / s.rank) ** 0.25
        self.rows = RowOptimizer("factor", "factor", s.optimizer, lr)
        self.start_table = self._start_table()
        self.shared = ClassParameters({"table": self.start_table}, s.optimizer != "sgd")
        self.learners = [self.rows, self.shared]

    def _start_table(self) -> torch.Tensor:
        """float32 [L, r + 1]: V, and b in the last column."""
        shape = (self.task.classes, self.s.rank)
        draws = uniform_array(mix(self.task.seed, _CLASS_FACTORS, 0), np.arange(shape[0] * shape[1])).reshape(shape)
        return torch.from_numpy(np.pad((2 * draws - 1) * self.scale, ((0, 0), (0, 1))).astype(np.float32))

    def fields(self) -> list[Field]:
        return self.rows.fields(Field("factor", (self.s.rank,), "float32", Given("role_factor")))

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        rows = np.arange(len(labels))
        return self._start_factors(np.full(len(rows), shard), rows)

    def _start_factors(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        draws = row_draws(self.task.seed, shards, rows[:, None] * self.s.rank + np.arange(self.s.rank))
        return ((2 * draws - 1) * self.scale).astype(np.float32)

    def read(self, outputs: Outputs, batch: Batch, step: Step) -> Estimate:
        current = self.rows.read(step)
        device = current.values.device
        table, self.start_table = self.shared.to(device)["table"], to_device(self.start_table, device)
        start = to_device(self._start_factors(batch.shards, batch.rows), device)
        return Estimate(_product(current.values, table), _product(start, self.start_table), current)

    def learn(self, estimate: Estimate, gradient: torch.Tensor, step: Step) -> dict[str, torch.Tensor | Masked]:
        current, table = estimate.parts, self.shared.values["table"]
        rows = self.rows.updated(current, gradient @ table[:, :-1], step)
        self.shared.update({"table": gradient.T @ _with_one(current.values)}, step, self.s.class_lr)
        return rows


def _with_one(factors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(factors, (0, 1), value=1.0)


def _product(factors: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return _with_one(factors) @ table.T
