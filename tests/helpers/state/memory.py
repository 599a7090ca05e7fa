"""The store's oracle: all state in RAM, under the same contract, for tests that compare or need no disk.

Its ranks are threads of one process that share a MemoryStore. Nothing outlives the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.fence import LostLaunch
from lacuna.state_store import histograms
from lacuna.state_store.fields import Field
from lacuna.state_store.io_threads import Metrics
from lacuna.state_store.log import Snapshot
from lacuna.state_store.manifest import Delta, Refs, check_deltas, merged, walk
from lacuna.state_store.rows import Rows
from lacuna.state_store.schema import Schema
from lacuna.state_store.slots import Slots
from lacuna.state_store.store import Initials


class MemoryStore:
    def __init__(self, rows: Sequence[int] | np.ndarray, fingerprint: str, fields: Sequence[Field], seed: int = 0):
        self.schema = Schema.of(rows, fingerprint, fields, seed)
        self.launch, self.lock = 0, threading.Lock()
        self.kept: dict[str, tuple[Snapshot, Refs]] = {}  # here a version is the rows themselves
        self.claims: dict[int, set[int]] = {}  # rank → shards
        self.number = 0

    def snapshots(self) -> list[Snapshot]:
        return sorted((entry for entry, _ in self.kept.values()), key=lambda entry: entry.number)

    def entry(self, name: str) -> Snapshot:
        if name not in self.kept:
            raise UserError(f"no snapshot {name!r}; there are {sorted(self.kept) or 'none'}.")
        return self.kept[name][0]

    def begin_launch(self) -> int:
        self.launch += 1
        self.claims = {}
        return self.launch

    def session(self, launch: int, rank: int = 0, world: int = 1, **options) -> MemorySession:
        return MemorySession(self, launch, rank, world, **options)

    def check_current(self, launch: int) -> None:
        if launch != self.launch:
            raise LostLaunch(f"launch {self.launch} has begun, so launch {launch} may not write any more. Stop it.")


class MemorySession:
    def __init__(self, store: MemoryStore, launch: int, rank: int = 0, world: int = 1, budget: int = 0,
                 snapshot: str | None = None, initials: Initials | None = None,
                 excluded: dict[str, histograms.Excluded] | None = None,
                 initial_counts: dict[str, np.ndarray] | None = None, threads: int | None = None):
        store.check_current(launch)
        if rank in store.claims:
            raise UserError(f"rank {rank} of launch {launch} already has a session. Close it first; a new launch "
                            "calls begin_launch().")
        store.claims[rank] = set()
        self.store, self.schema, self.launch, self.rank, self.world = store, store.schema, launch, rank, world
        self.initials, self.excluded, self.epoch = dict(initials or {}), dict(excluded or {}), 0
        self.metrics = Metrics()
        self._closed = self._exchange_due = False
        self._base: Refs
        self._written: Refs
        self._counts: dict[str, np.ndarray]
        self._set_base(snapshot)

    def begin(self, order: Sequence[int], epoch: int) -> None:
        for shard in order:
            self.schema.check_shard(shard)
        if len(set(order)) < len(order):
            raise UserError("the opening order names a shard twice: in one epoch every shard is opened once.")
        if self._exchange_due:
            raise UserError("an epoch ended without adopt(deltas): the other ranks' shards are not known here yet.")
        self.epoch = epoch
        self._claim(set(order))

    def _claim(self, shards: set[int]) -> None:
        with self.store.lock:
            for other, theirs in self.store.claims.items():
                if other != self.rank and shards & theirs:
                    raise UserError(f"shard {min(shards & theirs)} is held by rank {other} of this launch; rank "
                                    f"{self.rank} may not lease it.")
            self.store.claims[self.rank] = shards

    def lease(self, shard: int) -> None:
        self.schema.check_shard(shard)
        self._check_open()
        if self.slots.slot_of[shard] >= 0:
            raise UserError(f"shard {shard} is leased already; release it before leasing it again.")
        self._claim(self.store.claims[self.rank] | {shard})
        for name in self.schema.fields:
            rows = int(self.schema.counts[shard])
            self.slots.slabs[name][shard][:rows] = self._current(name, shard)
        self.slots.slot_of[shard] = shard  # every shard has its own slot
        self.metrics.leases += 1

    def release(self, shard: int) -> None:
        self.schema.check_shard(shard)
        self._check_open()
        if self.slots.slot_of[shard] < 0:
            raise UserError(f"shard {shard} is not leased, so it cannot be released.")
        self._keep(shard)
        self.slots.slot_of[shard] = -1

    def at(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        return Rows(self, np.asarray(shards), np.asarray(rows))

    def gather(self, field: str, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self.at(shards, rows).gather(field)

    def scatter(self, field: str, shards: np.ndarray, rows: np.ndarray, stored: np.ndarray) -> None:
        self.at(shards, rows).scatter(field, stored)

    def finish(self) -> None:
        leased = self._leased()
        if leased:
            raise UserError(f"shards {leased[:5]} are still leased: release them before the epoch ends.")
        self._exchange_due = self.world > 1
        self.store.claims[self.rank] = set()

    def prepare(self, durable: bool = True) -> Delta:
        self._check_open()
        for shard in self._leased():
            self._keep(shard)
        changes = {name: self._counted(name) - counts for name, counts in self._counts.items()}
        return Delta(self.launch, self.rank, self.world, durable,
                     {name: dict(shards) for name, shards in self._written.items()}, changes)

    def commit(self, name: str, deltas: Sequence[Delta], meta: dict | None = None) -> Snapshot:
        check_deltas(list(deltas), self.launch, self.world)
        if not all(delta.durable for delta in deltas):
            raise UserError("a delta of prepare(durable=False) cannot be committed: call prepare() on every rank.")
        self.store.check_current(self.launch)
        if name in self.store.kept and self.store.kept[name][0].launch == self.launch:
            raise UserError(f"snapshot {name!r} exists: snapshots are immutable. Choose another name, or delete it.")
        self.store.number += 1
        entry = Snapshot(self.store.number, self.launch, name, created=time.time(), meta=dict(meta or {}))
        self.store.kept[name] = (entry, merged(self._base, list(deltas)))
        return entry

    def adopt(self, deltas: Sequence[Delta]) -> None:
        check_deltas(list(deltas), self.launch, self.world)
        self._base, self._exchange_due = merged(self._base, list(deltas)), False
        own = next(delta for delta in deltas if delta.rank == self.rank)
        for name, shard, rows in walk(own.refs):
            if self._written.get(name, {}).get(shard) is rows:  # else training went on since prepare()
                del self._written[name][shard]
        self._counts = {name: counts + sum(delta.histograms[name] for delta in deltas)
                        for name, counts in self._counts.items()}

    def snapshot(self, name: str, meta: dict | None = None) -> Snapshot:
        deltas = [self.prepare()]
        entry = self.commit(name, deltas, meta)
        self.adopt(deltas)
        return entry

    def restore(self, name: str | None) -> None:
        self.finish()
        self._set_base(name)
        self._exchange_due = False

    def collect(self, keep: Sequence[str]) -> None:
        self.store.check_current(self.launch)
        self.store.kept = {self.store.entry(name).name: self.store.kept[name] for name in keep}

    def delete_snapshot(self, name: str) -> None:
        self.store.entry(name)
        self.collect([entry.name for entry in self.store.snapshots() if entry.name != name])

    def read_shard(self, field: str, shard: int) -> np.ndarray:
        if self.slots.slot_of[shard] >= 0:
            raise UserError(f"shard {shard} is leased: sweeps over all rows run between epochs, after finish().")
        return np.array(self._current(field, shard))

    def histogram(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        if field not in self._counts:
            raise UserError(f"field {self.slots.known(field)!r} keeps no histogram: declare it with histogram=True.")
        return self._counts[field].copy(), self._counted(field) - self._counts[field]

    def close(self) -> None:
        self._closed = True
        self.store.claims.pop(self.rank, None)

    def __enter__(self) -> MemorySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this session is closed; open a new one.")

    def _set_base(self, snapshot: str | None) -> None:
        if snapshot is not None:
            self.store.entry(snapshot)
        self._base = {} if snapshot is None else self.store.kept[snapshot][1]
        self._written = {}
        self.slots = Slots(self.schema, self.schema.shards)
        self._counts = {name: self._counted(name) for name, field in self.schema.fields.items() if field.histogram}

    def _leased(self) -> list[int]:
        return np.flatnonzero(self.slots.slot_of >= 0).tolist()

    def _keep(self, shard: int) -> None:
        """Copy what was scattered: versions, once given away, do not change."""
        for name in self.schema.fields:
            if self.slots.dirty[name][shard]:
                rows = self.slots.slabs[name][shard][: int(self.schema.counts[shard])]
                self._written.setdefault(name, {})[shard] = rows.copy()  # type: ignore[assignment]
                self.slots.dirty[name][shard] = False

    def _current(self, field: str, shard: int) -> np.ndarray:
        version = self._written.get(field, {}).get(shard)
        version = self._base.get(field, {}).get(shard) if version is None else version
        if version is not None:
            return version  # type: ignore[return-value]
        rows, given = int(self.schema.counts[shard]), self.initials.get(field)
        return self.schema.fields[field].initial_rows(self.schema.seed, shard, rows, given)

    def _counted(self, field: str) -> np.ndarray:
        outside = self.excluded.get(field)
        return sum(histograms.counts(self._current(field, shard), outside(shard) if outside else None)
                   for shard in range(self.schema.shards))  # type: ignore[return-value]
