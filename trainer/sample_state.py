"""Per-sample state in training: the store's session driven by the epoch plan, and snapshots tied to checkpoints.

The plan says which shards a rank opens in which order and when a shard has given its last row, so leasing, releasing
and reading ahead need nothing from the method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NoReturn, TypeVar

import numpy as np
import torch

from lacuna import state_store
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.chunks import DamagedChunk, chunk_url
from lacuna.state_store.cutoffs import Cutoffs, exact_cutoffs
from lacuna.state_store.log import fence_of
from lacuna.state_store.mending import snapshot_copy
from lacuna.state_store.sweep import map_shards
from lacuna.trainer.leased_shards import LeasedShards
from lacuna.trainer.methods.base import Method
from lacuna.trainer.metrics.exchange import Peers
from lacuna.trainer.on_device.traffic import Traffic
from lacuna.trainer.state_rows import NO_ROWS, StateRows
from lacuna.trainer.world import World

T = TypeVar("T")


class SampleState:
    """One rank's view of the fields that the method declares; lives as long as the run."""

    def __init__(self, url: str, method: Method, source: ShardSource, world: World, budget: int, seed: int,
                 snapshot: str | None, launch: int | None = None, own: bool = False):
        """`launch`: this one's number in the store's log, if it has begun there already. `own`: the store is part of
        the run's folder, so that without a checkpoint (`snapshot`) nothing in it is worth keeping."""
        self.world, self.source = world, source
        fields = method.fields()
        if launch is None:
            launch = world.broadcast(fence_of(url).begin() if world.main else None)
        if world.main:
            state_store.prepare(url, source.index.counts, self.fingerprint(source), fields, seed,
                                launch if own and snapshot is None else None)
        world.barrier()
        self.store = state_store.open(url, source.index.counts, self.fingerprint(source), fields, seed)
        initials = {field.name: (lambda shard, name=field.name: method.initial_rows(name, self._labels(shard), shard))
                    for field in fields if isinstance(field.initial, state_store.Given)}
        self.excluded = {field.name: self._outside for field in fields if field.histogram}
        self.session = self.store.session(launch, world.rank, world.size, budget=budget, snapshot=snapshot,
                                          initials=initials, excluded=self.excluded,
                                          initial_counts=method.initial_counts())
        self.traffic = None if world.device.type == "cpu" else Traffic(self.session, source, world.device)
        self.flying: list[tuple[list[Future[None]], np.ndarray]] = []  # of the last step, the shards of its samples

    @staticmethod
    def fingerprint(source: ShardSource) -> str:
        """The initial values come from the labels: another sidecar or subset is another store."""
        subset = source.subset.fingerprint if source.subset else ""
        return f"{source.index.fingerprint}-{source.sidecar.fingerprint}-{subset}"

    # ---- inside an epoch

    def begin_epoch(self, plan: EpochPlan, start_step: int, epoch: int) -> None:
        """`epoch` counts over all phases: it is part of the hash that rounds stochastically."""
        assert not self.flying, "an epoch begins before the rows of the last one have landed"
        streams = plan.rank_streams(self.world.rank, self.world.size)
        self.held = LeasedShards(self.session, plan, streams, start_step, "per-sample state")
        self.session.begin(self.held.order, epoch)
        if self.traffic:
            self.traffic.ahead.begin_epoch(plan.batches(streams, start_step))

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[StateRows]:
        """The rows of this rank's part of a global batch. Shards are leased before, and given back after the step in
        which they gave their last row; corrupt samples count as given.

        New rows from an accelerator land at the end of the next step, when the host has given it more to do."""
        slots = self.session.slots
        opened = self.held.new(batch.planned)
        if opened and np.count_nonzero(slots.slot_of >= 0) + len(opened) > slots.count:
            self.land()  # the step before gives back what this one needs
        self.held.take(batch.planned)
        at = self.session.at(batch.shards, batch.rows)
        landing: list[Future[None]] = []
        yield self.traffic.rows(at, landing) if self.traffic else StateRows(at, self.world.device)
        self.land()
        self.flying.append((landing, batch.planned))
        if not self.traffic:
            self.land()

    def land(self) -> None:
        """Wait until what came from the device is scattered, and give back the shards that are done."""
        for landing, planned in self.flying:
            for scattered in landing:
                scattered.result()
            self.held.give(planned)
        self.flying.clear()

    def end_epoch(self) -> None:
        self.land()
        self.session.finish()
        self.session.adopt(self.world.gather(self.session.prepare(durable=False)))

    # ---- between epochs

    def cutoffs(self, field: str, quotas: np.ndarray, epoch: int) -> Cutoffs:
        """Exact cut-offs of the `quotas[i]` highest scores of every class over all samples."""
        counts, changes = self.session.histogram(field)
        peers = Peers(self.world.control if self.world.size > 1 else None)
        return exact_cutoffs(self.session, field, quotas, counts + peers.sum(changes), epoch, self._outside, peers,
                             self.world.rank, self.world.size)

    def map_rows(self, fields: list[str], function: Callable[..., T]) -> Iterator[T]:
        """function(shard, row numbers [n], stored values [n, …] of each field) over the rows that take part, shard by
        shard of this rank's share; ranks add up what they find."""
        def of_shard(shard: int, values: dict[str, np.ndarray]) -> T:
            rows = np.arange(len(values[fields[0]]))
            used = slice(None) if self.source.subset is None else self.source.subset.mask(shard)
            return function(shard, rows[used], *(values[field][used] for field in fields))

        return map_shards(self.session, fields, of_shard, range(self.world.rank, self.store.schema.shards,
                                                                self.world.size))

    def sum_rows(self, fields: list[str], shape: tuple[int, ...],
                 function: Callable[..., np.ndarray]) -> torch.Tensor:
        """float64: the sum over all ranks of what `function` (as in map_rows) finds in every shard."""
        total = np.zeros(shape)
        for part in self.map_rows(fields, function):
            total += part
        return self.world.global_sum(torch.from_numpy(total).to(self.world.device)).cpu()

    @property
    def longest(self) -> int:
        """Rows of the longest shard: shard · longest + row numbers the samples."""
        return self.store.schema.max_rows

    # ---- snapshots

    def snapshot(self, name: str) -> bytes | None:
        """Commit a snapshot; on rank 0, the copy of it that the checkpoint keeps."""
        self.land()
        deltas = self.world.gather(self.session.prepare())
        if self.world.main:
            self.session.commit(name, deltas)
        self.session.adopt(deltas)
        return snapshot_copy(self.store, name) if self.world.main else None

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
        if self.traffic:
            self.traffic.close()
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


class NoState:
    """Of methods that remember nothing about single samples: there is nothing to lease, to keep or to restore."""

    def begin_epoch(self, plan: EpochPlan, start_step: int, epoch: int) -> None: ...

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[StateRows]:
        yield NO_ROWS

    def end_epoch(self) -> None: ...

    def cutoffs(self, field: str, quotas: np.ndarray, epoch: int) -> NoReturn:
        NO_ROWS.read(field)

    def map_rows(self, fields: list[str], function: Callable[..., T]) -> NoReturn:
        NO_ROWS.read(fields[0])

    def sum_rows(self, fields: list[str], shape: tuple[int, ...], function: Callable[..., np.ndarray]) -> NoReturn:
        NO_ROWS.read(fields[0])

    @property
    def longest(self) -> NoReturn:
        raise RuntimeError("the method declares no fields")

    def snapshot(self, name: str) -> None:
        return None

    def restore(self, name: str) -> None: ...

    def collect(self, keep: list[str]) -> None: ...

    def snapshots_with(self, chunk: DamagedChunk) -> list[str]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...
