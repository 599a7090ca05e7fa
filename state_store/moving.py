"""Moving rows by sample key: a table from keys to (shard, row), and bulk writing of a new snapshot."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.state_store import chunks
from lacuna.state_store.fields import Draw, Given
from lacuna.state_store.manifest import Refs
from lacuna.state_store.store import Initials, SnapshotReader, StateStore

Keys = Callable[[int], Sequence[str]]  # shard → sample keys in row order
Batch = tuple[Sequence[str], dict[str, np.ndarray]]  # keys and stored rows of some fields


class KeyTable:
    """Where every key is: 16 bytes a sample, so that nine million keys fit beside the state."""

    def __init__(self, keys: Keys, shards: int):
        hashes, places = [], []
        for shard in range(shards):
            found = _hashes(keys(shard))
            hashes.append(found)
            places.append((np.int64(shard) << 32) | np.arange(len(found)))
        every = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
        order = np.argsort(every, kind="stable")
        self.hashes, self.places = every[order], np.concatenate(places)[order]
        twice = np.flatnonzero(self.hashes[1:] == self.hashes[:-1])
        if len(twice):
            spots = [(int(p) >> 32, int(p) & 0xFFFFFFFF) for p in self.places[twice[0] : twice[0] + 2]]
            key = keys(spots[0][0])[spots[0][1]]
            raise UserError(f"sample key {key!r} occurs twice, as (shard, row) {spots[0]} and {spots[1]}: state cannot "
                            "be moved by key. Make keys unique with `lacuna shards make`.")

    def find(self, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(shards, rows) int64 of the keys; -1 where a key is unknown."""
        asked = _hashes(keys)
        at = np.minimum(np.searchsorted(self.hashes, asked), max(0, len(self.hashes) - 1))
        if not len(self.hashes):
            return np.full(len(asked), -1), np.full(len(asked), -1)
        known = self.hashes[at] == asked
        place = self.places[at]
        return np.where(known, place >> 32, -1), np.where(known, place & 0xFFFFFFFF, -1)


class BulkWriter:
    """Writes whole chunks of a store outside training and commits them as one snapshot."""

    def __init__(self, store: StateStore, base: Refs | None = None):
        self.store, self.launch, self._count = store, store.fence.begin(), itertools.count()
        self.refs: Refs = {name: dict(shards) for name, shards in (base or {}).items()}
        self._urls: list[str] = []

    def write(self, field: str, shard: int, rows: np.ndarray) -> None:
        """Stored rows of one chunk, [rows of the shard, *stored_shape]."""
        spec = self.store.schema.fields[field]
        padded = np.zeros((self.store.schema.max_rows, *spec.stored_shape), spec.stored_dtype)
        padded[: len(rows)] = rows
        token = f"{self.launch}-0-{next(self._count)}"
        self.refs.setdefault(field, {})[shard] = chunks.write(self.store.url, spec, shard, token, padded)
        self._urls.append(chunks.chunk_url(self.store.url, field, shard, token))

    def commit(self, name: str, meta: dict | None = None) -> None:
        storage.sync(self._urls)
        self.store.commit(name, self.refs, {}, self.launch, meta)


def move_rows(source: Callable[[], Iterable[Batch]], table: KeyTable, writer: BulkWriter, base: SnapshotReader,
              budget: int) -> tuple[int, int]:
    """Give rows of `source` their places in the writer's store; the others keep what `base` holds.

    Target shards are filled in groups that fit the budget, and each group reads the source once. Returns (rows moved,
    rows of the source that have no place).
    """
    schema = writer.store.schema
    group = max(1, budget // max(1, schema.shard_bytes))
    moved = unplaced = 0
    for start in range(0, schema.shards, group):
        wanted = range(start, min(start + group, schema.shards))
        filled: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
        for keys, fields in source():
            shards, rows = table.find(keys)
            unplaced += int((shards < 0).sum()) if start == 0 else 0
            for shard in np.unique(shards[(shards >= wanted.start) & (shards < wanted.stop)]).tolist():
                here = np.flatnonzero(shards == shard)
                for name, stored in fields.items():
                    target, covered = filled.setdefault((name, shard), _empty(schema, name, shard))
                    target[rows[here]] = stored[here]
                    covered[rows[here]] = True
        moved += _write_group(filled, writer, base)
    return moved, unplaced


def _empty(schema, name: str, shard: int) -> tuple[np.ndarray, np.ndarray]:
    spec, count = schema.fields[name], int(schema.counts[shard])
    return np.zeros((count, *spec.stored_shape), spec.stored_dtype), np.zeros(count, bool)


def _write_group(filled: dict, writer: BulkWriter, base: SnapshotReader) -> int:
    covered_rows: dict[int, np.ndarray] = {}
    for (name, shard), (target, covered) in sorted(filled.items()):
        spec = base.schema.fields[name]
        if not covered.all():
            never_written = base.refs.get(name, {}).get(shard) is None
            if never_written and isinstance(spec.initial, Given) and name not in (base.initials or {}):
                lost = int((~covered).sum())
                raise UserError(f"field {name!r}, shard {shard}: {lost} rows have no state to move and "
                                f"would start from a function ({spec.initial.name!r}) that only training knows. Train "
                                "one whole epoch before moving, or pass initials.")
            target[~covered] = base.read_shard(name, shard)[~covered]
        writer.write(name, shard, target)
        covered_rows[shard] = covered_rows.get(shard, covered) | covered
    return sum(int(rows.sum()) for rows in covered_rows.values())


def stored_batches(reader: SnapshotReader, keys: Keys, initials: Initials) -> Iterator[Batch]:
    """All rows of a snapshot that differ from what another place would start with: written chunks, and drawn or given
    initial values (they depend on the place)."""
    for shard in range(reader.schema.shards):
        fields = {}
        for name, spec in reader.schema.fields.items():
            written = reader.refs.get(name, {}).get(shard) is not None
            if written or isinstance(spec.initial, Draw) or (isinstance(spec.initial, Given) and name in initials):
                fields[name] = reader.read_shard(name, shard)
        if fields:
            yield keys(shard), fields


def _hashes(keys: Sequence[str]) -> np.ndarray:
    digest = b"".join(hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(digest, "<u8")
