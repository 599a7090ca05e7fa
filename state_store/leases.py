"""Shards held in RAM while their samples are in flight: read ahead in opening order, written behind when given back.

The training thread calls; the I/O threads do the reading and writing. What they read and write is the business of the
two kinds of leases: versions of a run's state (session.py), and rows that can be computed again (derived.py).
"""

from __future__ import annotations

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.state_store.io_threads import IoThreads, Metrics
from lacuna.state_store.rows import Rows
from lacuna.state_store.schema import Schema
from lacuna.state_store.slots import Slots

_REMOTE_THREADS = 8  # a request to object storage mostly waits


def io_threads_for(url: str) -> int:
    return 2 if storage.is_local(url) else _REMOTE_THREADS


class Leases:
    def __init__(self, schema: Schema, budget: int, threads: int):
        """`budget` bytes of RAM."""
        self.schema, self.epoch = schema, 0
        self.slots = Slots.within(schema, budget)
        self._io = IoThreads(list(schema.fields), self.slots.count, threads, self._load, self._store)

    @property
    def metrics(self) -> Metrics:
        return self._io.metrics

    def lease(self, shard: int) -> None:
        """Hold a shard's rows in RAM; blocks only while they are not read yet (see `metrics.stall_seconds`)."""
        self.schema.check_shard(shard)
        record = self._io.lease(shard)
        self.slots.slot_of[shard] = record.slot

    def release(self, shard: int) -> None:
        """Give the shard back after its last row; what changed is written behind."""
        slot = self._leased_slot(shard)
        dirty = self._take_dirty(slot)
        self.slots.slot_of[shard] = -1
        self._io.release(shard, dirty)

    def at(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """The samples (shards[b], rows[b]) of a batch, all leased: gather/scatter stored values, read/write floats."""
        return Rows(self, np.asarray(shards), np.asarray(rows))

    def spill(self) -> None:
        """Write what is dirty; leases stay."""
        leased = np.flatnonzero(self.slots.slot_of >= 0).tolist()
        self._io.spill({s: d for s in leased if (d := self._take_dirty(int(self.slots.slot_of[s])))})

    def _leased_slot(self, shard: int) -> int:
        self.schema.check_shard(shard)
        slot = int(self.slots.slot_of[shard])
        if slot < 0:
            raise UserError(f"shard {shard} is not leased, so it cannot be released.")
        return slot

    def _take_dirty(self, slot: int) -> list[str]:
        dirty = [name for name, flags in self.slots.dirty.items() if flags[slot]]
        for name in dirty:
            self.slots.dirty[name][slot] = False
        return dirty

    # ---- in the I/O threads

    def _load(self, field: str, shard: int, slot: int) -> None:
        raise NotImplementedError

    def _store(self, field: str, shard: int, slot: int) -> None:
        raise NotImplementedError
