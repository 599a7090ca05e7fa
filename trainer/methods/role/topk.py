"""ROLE's label estimator `topk`: logits of the k most likely entries of a sample, for L too large for all of them.

An entry that is not tracked counts as negative: its estimate is the constant σ(φ) = 1e-5, which does not learn.
Annotated positives are always tracked. At the first visit the classes that the classifier ranks highest get the other
places and start as in `dense`. Later, an untracked class takes the place of the lowest estimate if the classifier's
logit, cut at logit(0.6), is above it; it starts there, with moments of zero. With k = L this is `dense`.
Travel is measured over tracked entries, from where `dense` starts them. Legend: B batch rows, k places, L classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.state_store import Field, Given
from lacuna.state_store.topk import UNTRACKED, topk_fields
from lacuna.trainer.methods.base import Masked, Outputs, Step, negative, positive, unknown
from lacuna.trainer.methods.role.dense import CLAMP, KNOWN, SPREAD, Estimate, Estimator, mean_where, start_logits
from lacuna.trainer.methods.role.row_optimizer import Current, RowOptimizer
from lacuna.trainer.on_device.hashing import signed, uniform
from lacuna.trainer.on_device.uploads import to_device

_LAST = -1e9  # rank of verified negatives: they get a place only if there are too many


@dataclass
class Tracked:
    ids: torch.Tensor  # int64 [B, k]
    rows: Current  # [B, k]
    start: torch.Tensor  # float32 [B, k]


class TopK(Estimator):
    """State: ids, φ and its moments of k entries."""

    def __init__(self, s, task, lr):
        super().__init__(s, task, lr)
        if not 1 <= s.top_k <= task.classes:
            raise UserError(f"method.top_k = {s.top_k}: the estimator 'topk' tracks 1 to {task.classes} of the "
                            f"{task.classes} classes.")
        self.rows = RowOptimizer("phi_values", "phi", s.optimizer, lr, CLAMP)
        self.learners = [self.rows]

    def fields(self) -> list[Field]:
        ids, values = topk_fields("phi", self.s.top_k, self.task.classes, self.s.phi_dtype, initial=KNOWN,
                                  stochastic=self.s.phi_dtype == "float16")
        return [replace(ids, initial=Given("positives")), *self.rows.fields(values)]

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        """Annotated positives in the first places; the others are chosen at the first visit."""
        is_positive, k = labels == POSITIVE, self.s.top_k
        most = int(is_positive.sum(1).max(initial=0))
        if most > k:
            row = int(is_positive.sum(1).argmax())
            raise UserError(f"method.top_k = {k}: row {row} of shard {shard} has {most} annotated positives, which "
                            f"are always tracked. Set method.top_k to {most} or more.")
        first = np.argsort(~is_positive, axis=1, kind="stable")[:, :k]
        return np.where(np.take_along_axis(is_positive, first, 1), first, UNTRACKED).astype(np.int32)

    def read(self, outputs: Outputs, batch: Batch, step: Step) -> Estimate:
        ids = step.state.read("phi_ids").long()
        ids, rows = self._track(ids, self.rows.read(step), outputs.logits.detach(), batch)
        phi = torch.full_like(outputs.logits, -CLAMP, requires_grad=False).scatter_(1, ids, rows.values)
        return Estimate(phi, phi, Tracked(ids, rows, self._start(batch, ids)))

    def _start(self, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
        """[B, q]: where `dense` starts these entries, annotated ones included."""
        start = self._draws(batch, ids)
        here = torch.gather(batch.labels, 1, ids)
        return torch.where(positive(here), KNOWN, torch.where(negative(here), -KNOWN, start))

    def _draws(self, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
        """float32 [B, q]: `start_logits` where the ids are, bit for bit."""
        if ids.device.type == "cpu":
            return torch.from_numpy(start_logits(self.task, batch.shards, batch.rows, ids.numpy())).float()
        seeds = np.array([signed(mix(self.task.seed, int(shard))) for shard in batch.shards], np.int64)
        numbers = to_device(batch.rows.astype(np.int64) * self.task.classes, ids.device)[:, None] + ids
        return ((2 * uniform(to_device(seeds, ids.device)[:, None], numbers) - 1) * SPREAD).float()

    def _track(self, ids: torch.Tensor, rows: Current, logits: torch.Tensor,
               batch: Batch) -> tuple[torch.Tensor, Current]:
        """Fill empty places, or let the classifier's favourites evict the lowest estimates."""
        k, empty = self.s.top_k, ids == UNTRACKED
        fresh = empty.any(1, keepdim=True)
        safe = ids.clamp(min=0)
        tracked = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, safe, ~empty)
        # An empty place points to class 0 as well: whether that one is tracked is said by its own place only.
        tracked[:, 0] = (ids == 0).any(1)
        wanted = torch.where(negative(batch.labels), _LAST, logits)
        wanted, offers = torch.where(tracked, -torch.inf, wanted).topk(k, dim=1)
        start = torch.where(fresh, self._start(batch, offers), wanted.clamp(max=SPREAD))
        rank = torch.where(positive(torch.gather(batch.labels, 1, safe)), torch.inf, rows.values)
        rank = torch.cat([torch.where(empty, -torch.inf, rank), torch.where(fresh, wanted, start)], 1)
        # Stable: of equals, those that are tracked stay. Those that stay keep their order.
        best = rank.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values

        def take(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.gather(torch.cat([old, new], 1), 1, best)

        zeros = torch.zeros_like(start)
        m = None if rows.m is None else take(rows.m, zeros)
        v = None if rows.v is None else take(rows.v, zeros)
        return take(ids, offers), Current(take(rows.values, start), m, v, rows.last)

    def learn(self, estimate: Estimate, gradient: torch.Tensor, step: Step) -> dict[str, torch.Tensor | Masked]:
        tracked: Tracked = estimate.parts
        rows = self.rows.updated(tracked.rows, torch.gather(gradient, 1, tracked.ids), step)
        return {"phi_ids": tracked.ids, **rows}

    def travel(self, estimate: Estimate, labels: torch.Tensor) -> torch.Tensor:
        tracked: Tracked = estimate.parts
        moved = (tracked.rows.values - tracked.start).abs()
        return mean_where(moved, unknown(torch.gather(labels, 1, tracked.ids)))
