"""Slots: the RAM that leased shards live in. One slab per field, so one batch over several shards is one copy.

Legend: a slot holds one shard; a slab is [slots, max_rows, *stored_shape]; B rows of a batch.
"""

from __future__ import annotations

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.state_store.schema import Schema


class Slots:
    def __init__(self, schema: Schema, count: int):
        self.schema, self.count = schema, count
        # zeros, not empty: the kernel gives the pages when a slot is first used.
        self.slabs = {f.name: np.zeros((count, schema.max_rows, *f.stored_shape), f.stored_dtype)
                      for f in schema.fields.values()}
        # Rows as they were last read or written, of fields with a histogram: what changed is then known at write-back.
        self.before = {f.name: np.zeros_like(self.slabs[f.name]) for f in schema.fields.values() if f.histogram}
        self.flat = {name: slab.reshape(count * schema.max_rows, *slab.shape[2:]) for name, slab in self.slabs.items()}
        self.dirty = {name: np.zeros(count, bool) for name in self.slabs}
        self.slot_of = np.full(schema.shards, -1, np.int64)  # of leased shards; -1: not leased

    @staticmethod
    def bytes_each(schema: Schema) -> int:
        copies = sum(f.row_bytes * schema.max_rows for f in schema.fields.values() if f.histogram)
        return schema.shard_bytes + copies

    @classmethod
    def within(cls, schema: Schema, budget: int) -> Slots:
        return cls(schema, cls.count_within(schema, budget))

    @classmethod
    def count_within(cls, schema: Schema, budget: int) -> int:
        """As many slots as the RAM budget allows, at most one a shard."""
        each = cls.bytes_each(schema)
        if budget < each:
            raise UserError(f"RAM budget {budget / 1e6:.1f} MB holds no shard: one shard of {schema.max_rows} rows "
                            f"needs {each / 1e6:.1f} MB. Raise the budget or make smaller shards.")
        return min(schema.shards, budget // each)

    def locate(self, shards: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(flat index, slot) of every sample of a batch; both int64 [B]."""
        shards, rows = np.asarray(shards, dtype=np.int64), np.asarray(rows, dtype=np.int64)
        if shards.shape != rows.shape or shards.ndim != 1:
            raise UserError(f"shards {shards.shape} and rows {rows.shape} must be vectors of one length.")
        if not len(shards):
            return rows, shards
        if int(shards.min()) < 0 or int(shards.max()) >= self.schema.shards:
            bad = int(shards[(shards < 0) | (shards >= self.schema.shards)][0])
            self.schema.check_shard(bad)
        slots = self.slot_of.take(shards)
        if int(slots.min()) < 0:
            raise UserError(f"shard {int(shards[slots < 0][0])} is not leased: call lease(shard) before its rows are "
                            "gathered or scattered, and release(shard) after the last of them.")
        if int(rows.min()) < 0 or (rows >= self.schema.counts.take(shards)).any():
            bad = int(np.flatnonzero((rows < 0) | (rows >= self.schema.counts[shards]))[0])
            raise UserError(f"row {int(rows[bad])} of shard {int(shards[bad])}: it has rows "
                            f"0..{int(self.schema.counts[shards[bad]]) - 1}.")
        return slots * self.schema.max_rows + rows, slots

    def gather(self, field: str, index: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        # Every index was checked by locate(); mode="clip" writes to `out` directly, the default would buffer.
        return self.flat[self.known(field)].take(index, axis=0, out=out, mode="clip")

    def scatter(self, field: str, index: np.ndarray, slots: np.ndarray, stored: np.ndarray) -> None:
        flat = self.flat[self.known(field)]
        if stored.dtype != flat.dtype or stored.shape != (len(index), *flat.shape[1:]):
            raise UserError(f"field {field!r}: scatter got {stored.dtype} {stored.shape}, it stores {flat.dtype} "
                            f"{(len(index), *flat.shape[1:])}. Use write() for floats.")
        flat[index] = stored
        self.dirty[field][slots] = True

    def known(self, field: str) -> str:
        if field not in self.flat:
            raise UserError(f"no field {field!r}; the store has {sorted(self.flat)}.")
        return field
