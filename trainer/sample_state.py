"""Per-sample state in training: the store's session driven by the epoch plan, and snapshots tied to checkpoints.

The plan says which shards a rank opens in which order and when a shard has given its last row, so leasing, releasing
and reading ahead need nothing from the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import Batch
from lacuna.state_store.chunks import DamagedChunk, chunk_url
from lacuna.state_store.cutoffs import Cutoffs, exact_cutoffs
from lacuna.state_store.rows import Rows
from lacuna.state_store.sweep import map_shards
from lacuna.trainer.methods.base import Masked, Method
from lacuna.trainer.metrics.exchange import Peers
from lacuna.trainer.world import World

T = TypeVar("T")


class SampleState:
    """One rank's view of the fields that the method declares; lives as long as the run."""

    def __init__(self, url: str, method: Method, source: ShardSource, world: World, budget: int, seed: int,
                 snapshot: str | None):
        self.world, self.source = world, source
        fields = method.fields()
        if world.main and not storage.exists(storage.join(url, "zarr.json")):
            state_store.create(url, source.index.rows, self.fingerprint(source), fields, seed)
        world.barrier()
        self.store = state_store.open(url, source.index.rows, self.fingerprint(source), fields, seed)
        attempt = world.broadcast(self.store.begin_attempt() if world.main else None)
        initials = {field.name: (lambda shard, name=field.name: method.initial_rows(name, self._labels(shard), shard))
                    for field in fields if isinstance(field.initial, state_store.Given)}
        self.excluded = {field.name: self._outside for field in fields if field.histogram}
        self.session = self.store.session(attempt, world.rank, world.size, budget=budget, snapshot=snapshot,
                                          initials=initials, excluded=self.excluded,
                                          initial_counts=method.initial_counts())

    @staticmethod
    def fingerprint(source: ShardSource) -> str:
        """The initial values come from the labels: another sidecar or subset is another store."""
        subset = source.subset.fingerprint if source.subset else ""
        return f"{source.index.fingerprint}-{source.sidecar.fingerprint}-{subset}"

    # ---- inside an epoch

    def begin_epoch(self, plan: EpochPlan, start_step: int, epoch: int) -> None:
        """`epoch` counts over all phases: it is part of the hash that rounds stochastically."""
        streams = plan.rank_streams(self.world.rank, self.world.size)
        self.remaining, order, needed = self.outlook(plan, streams, start_step)
        if self.session.slots.count < needed:
            each = self.session.slots.bytes_each(self.store.schema) / 1e6
            raise UserError(
                f"train.state_budget_mb holds {self.session.slots.count} shards, but this rank's {len(streams)} "
                f"streams lease {needed} at a time (data.open_shards = {plan.open_shards}, and those a batch opens). "
                f"Raise train.state_budget_mb to {(needed + len(streams)) * each:.1f}, lower data.open_shards, "
                "use more ranks, or make other shards."
            )
        self.session.begin(order, epoch)
        self.planned: Iterator[tuple[np.ndarray, np.ndarray]] = plan.batches(streams, start_step)

    @staticmethod
    def outlook(plan: EpochPlan, streams: range, start_step: int) -> tuple[np.ndarray, list[int], int]:
        """Rows that each shard still has to give, the shards in the order of their first use, and how many are leased
        at a time: those open, and one more for every time unit that a batch crosses."""
        remaining = np.zeros(len(plan.rows), dtype=np.int64)
        first_use: list[tuple[int, int]] = []
        needed = 0
        for stream in streams:
            ends = [0]
            for shards, _ in plan.walk(stream, start_step * plan.quota):
                counts = np.bincount(shards, minlength=len(plan.rows))
                for shard in np.flatnonzero((counts > 0) & (remaining == 0)):
                    first_use.append((ends[-1] + int(np.argmax(shards == shard)), int(shard)))
                remaining += counts
                ends.append(ends[-1] + len(shards))
            first = np.arange(0, ends[-1], plan.quota)
            last = np.minimum(first + plan.quota, ends[-1]) - 1
            crossed = np.searchsorted(ends, last, "right") - np.searchsorted(ends, first, "right")
            needed += min(len(plan.stream_shards[stream]), plan.open_shards + int(crossed.max(initial=0)))
        return remaining, [shard for _, shard in sorted(first_use)], needed

    def begin_step(self) -> None:
        """Lease the shards of this rank's part of the next global batch."""
        self.step_shards, _ = next(self.planned)
        for shard in np.unique(self.step_shards):
            if self.session.slots.slot_of[shard] < 0:
                self.session.lease(int(shard))

    def rows(self, batch: Batch) -> StateRows:
        return StateRows(self.session.at(batch.shards, batch.rows), self.world.device)

    def end_step(self) -> None:
        """Give back the shards that have given their last row; corrupt samples count as given."""
        self.remaining -= np.bincount(self.step_shards, minlength=len(self.remaining))
        for shard in np.unique(self.step_shards):
            if self.remaining[shard] == 0:
                self.session.release(int(shard))

    def end_epoch(self) -> None:
        self.session.finish()
        self.session.adopt(self.world.gather(self.session.prepare(durable=False)))

    # ---- between epochs

    def cutoffs(self, field: str, quotas: np.ndarray, epoch: int) -> Cutoffs:
        """Exact cut-offs of the `quotas[i]` highest scores of every class over all samples."""
        counts, changes = self.session.histogram(field)
        peers = Peers(self.world.control if self.world.size > 1 else None)
        return exact_cutoffs(self.session, field, quotas, counts + peers.sum(changes), epoch, self._outside, peers,
                             self.world.rank, self.world.size)

    def map_rows(self, field: str, function: Callable[[int, np.ndarray, np.ndarray], T]) -> Iterator[T]:
        """function(shard, row numbers [n], stored values [n, …]) of the rows that take part, over this rank's share of
        all shards; ranks add up what they find."""
        def of_shard(shard: int, values: dict[str, np.ndarray]) -> T:
            rows = np.arange(len(values[field]))
            used = slice(None) if self.source.subset is None else self.source.subset.mask(shard)
            return function(shard, rows[used], values[field][used])

        return map_shards(self.session, [field], of_shard, range(self.world.rank, self.store.schema.shards,
                                                                 self.world.size))

    # ---- snapshots

    def snapshot(self, name: str) -> None:
        deltas = self.world.gather(self.session.prepare())
        if self.world.main:
            self.session.commit(name, deltas)
        self.session.adopt(deltas)

    def restore(self, name: str) -> None:
        self.session.restore(name)
        self.world.barrier()

    def collect(self, keep: list[str]) -> None:
        if self.world.main:
            self.session.collect(keep)

    def snapshots_with(self, chunk: DamagedChunk) -> list[str]:
        """Names of the snapshots that a damaged chunk belongs to."""
        found = []
        for entry in self.store.snapshots():
            ref = self.store.manifest(entry.name).refs.get(chunk.field, {}).get(chunk.shard)
            if ref is not None and chunk_url(self.store.url, chunk.field, chunk.shard, ref.token) == chunk.url:
                found.append(entry.name)
        return found

    def metrics(self) -> dict[str, float]:
        m = self.session.metrics
        return {"state_stall_seconds": m.stall_seconds, "state_bytes_read": m.bytes_read,
                "state_bytes_written": m.bytes_written}

    def close(self) -> None:
        self.session.close()

    def _labels(self, shard: int) -> np.ndarray:
        return self.source.sidecar.labels(shard).dense(self.source.classes)

    def _outside(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, classes) that are outside the ranking: verified negatives, and rows that the subset leaves out."""
        outside = self._labels(shard) == NEGATIVE
        if self.source.subset is not None:
            outside[~self.source.subset.mask(shard)] = True
        rows, classes = np.nonzero(outside)
        return rows, classes


class StateRows:
    """A batch's rows as tensors on the training device."""

    def __init__(self, rows: Rows, device: torch.device):
        self._rows, self._device = rows, device

    def read(self, field: str) -> torch.Tensor:
        """Values as floats (quantised, float16), booleans (bits) or integers."""
        stored = self._rows.gather(field)
        if stored.dtype == np.float16:  # torch widens halves many times faster than numpy
            return torch.from_numpy(stored).to(self._device, non_blocking=True).float()
        return torch.from_numpy(self._rows.decode(field, stored)).to(self._device, non_blocking=True)

    def codes(self, field: str) -> np.ndarray:
        """Stored values, for cut-offs."""
        return self._rows.gather(field)

    def samples(self, rows_per_shard: int) -> np.ndarray:
        """int64 [B]: a number for every sample, shard by shard."""
        return self._rows.shards.astype(np.int64) * rows_per_shard + self._rows.rows

    def selected(self, field: str, cutoffs: Cutoffs) -> torch.Tensor:
        """bool [B, L]: which entries are among their class's top p."""
        chosen = cutoffs.selected(self.codes(field), self._rows.shards, self._rows.rows)
        return torch.from_numpy(chosen).to(self._device, non_blocking=True)

    def write(self, values: dict[str, torch.Tensor | Masked]) -> None:
        for field, value in values.items():
            if isinstance(value, Masked):
                before = self._rows.gather(field)
                self._rows.write(field, value.values.detach().cpu().numpy())
                # What the mask leaves out must stay bit for bit: rounding it again could move it.
                after = np.where(value.mask.cpu().numpy(), self._rows.gather(field), before)
                self._rows.scatter(field, after)
            else:
                self._rows.write(field, value.detach().cpu().numpy())
