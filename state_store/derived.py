"""Rows that can be computed again, such as what a fixed network makes of a sample: one object per shard, no snapshots.

Any number of processes may read and fill the same folder at once. A shard is one object that is replaced whole, with a
checksum at its end; the first byte of a row says whether something was put there. Who finds an object damaged, or
another writer's with fewer rows, computes those rows again: what is lost costs time, never correctness.
Layout: shards/<shard>, and filled/<shard>, one bit per row, so that a reader knows early what it will find. The bits
are a hint that may be late; the object itself decides.
"""

from __future__ import annotations

import logging

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.refusals import refusal
from lacuna.state_store import chunks
from lacuna.state_store.fields import Field
from lacuna.state_store.leases import Leases, io_threads_for
from lacuna.state_store.schema import Schema

ROWS = "rows"  # the one field: uint8 [bytes of a row], of which the first is 1 where a row is filled
log = logging.getLogger("lacuna")


class DerivedRows(Leases):
    def __init__(self, url: str, schema: Schema, budget: int):
        self.url = url
        super().__init__(schema, budget, io_threads_for(url))

    @staticmethod
    def schema_of(counts: np.ndarray, row_bytes: int) -> Schema:
        return Schema.of(counts, "", [Field(ROWS, (row_bytes,), "uint8", compression="none")], 0)

    def begin(self, order: list[int]) -> None:
        """Announce the shards that will be leased, in opening order; reading ahead starts now."""
        self._io.prefetch(order)

    def close(self, whole: bool = True) -> None:
        """Write what is dirty, unless something went wrong, and stop the threads."""
        try:
            if whole:
                self.spill()
        finally:
            self._io.stop()

    def _load(self, field: str, shard: int, slot: int) -> None:
        spec, out = self.schema.fields[field], self.slots.slabs[field][slot]
        if not read_rows(self.url, spec, shard, out):
            out[:] = 0

    def _store(self, field: str, shard: int, slot: int) -> None:
        write_rows(self.url, self.schema.fields[field], shard, self.slots.slabs[field][slot])


def read_rows(url: str, spec: Field, shard: int, out: np.ndarray) -> bool:
    """A shard's rows into `out` [max_rows, bytes]; False: there are none that can be trusted."""
    where = shard_url(url, shard)
    try:
        chunks.decode_into(spec, storage.read_bytes(where), out, None, where, shard)
    except FileNotFoundError:
        return False
    except chunks.DamagedChunk as error:
        log.warning("%s is %s: its rows are computed again", where, error.kind)
        return False
    return True


def write_rows(url: str, spec: Field, shard: int, rows: np.ndarray) -> None:
    parts, _, _ = chunks.encode(spec, rows)
    try:
        storage.write_atomic(shard_url(url, shard), b"".join(parts), durable=False)
        storage.write_atomic(_filled_url(url, shard), np.packbits(rows[:, 0] == 1).tobytes(), durable=False)
    except UserError:
        raise  # object storage, in its own words
    except OSError as error:
        raise UserError(f"cannot write to a cache: {refusal(error, url) or f'{url}: {error}'}. Nothing half-written is "
                        "used. `lacuna cache --prune` makes room; or set train.cache_url to other storage.") from error


def filled_rows(url: str, shard: int, count: int) -> np.ndarray:
    """bool [count]: which rows a shard's object has, as far as its writer said; it may have fewer by now."""
    try:
        bits = np.frombuffer(storage.read_bytes(_filled_url(url, shard)), np.uint8)
    except FileNotFoundError:
        return np.zeros(count, bool)
    found = np.unpackbits(bits)[:count].astype(bool)
    return np.pad(found, (0, count - len(found)))


def shard_url(url: str, shard: int) -> str:
    return storage.join(url, "shards", f"{shard:06d}")


def _filled_url(url: str, shard: int) -> str:
    return storage.join(url, "filled", f"{shard:06d}")
