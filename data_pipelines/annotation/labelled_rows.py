"""What an annotation scheme sees of a dataset: true labels in bounded chunks, and the rows in their original order.

Draws that the papers fix bit for bit need the order of the original files (before `shards make` shuffled); the others
are hashes of (seed, position, class), so they do not depend on how the dataset is cut into shards, and need no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix_array
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.data_pipelines.subsets import Subset

_CHUNK_ENTRIES = 4_000_000
_HASH_BINS = 1 << 16
_BIN_SHIFT = np.uint64(63 - 16)


@dataclass(frozen=True)
class Chunk:
    """Some rows of one shard."""

    rows: np.ndarray  # int64 [n]: rows of the shard
    ids: np.ndarray  # int64 [n]: the rows' numbers when all shards' rows are counted through
    positions: np.ndarray  # int64 [n]: their places in the original order
    targets: np.ndarray  # int8 [n, L]: true labels

    def entries(self, value: int) -> tuple[np.ndarray, np.ndarray]:
        """(row of the chunk, class) of all entries with this label."""
        rows, classes = np.divmod(np.flatnonzero(self.targets.reshape(-1) == value), self.targets.shape[1])
        return rows, classes

    def hashes(self, seed: int, rows: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """uint64: a uniform draw of 63 bits for every entry, so that "one above the largest" still fits."""
        return mix_array(seed, self.positions[rows] * self.targets.shape[1] + classes) >> np.uint64(1)


@dataclass(frozen=True)
class LabelledRows:
    """The rows of an index that take part (`within`, or all) with the labels of a sidecar."""

    index: ShardIndex
    sidecar: Sidecar
    within: Subset | None = None

    @property
    def classes(self) -> int:
        return len(self.index.classes)

    @cached_property
    def first_ids(self) -> np.ndarray:
        """int64 [shards + 1]: number of a shard's first row when all are counted through."""
        return np.concatenate([[0], np.cumsum(self.index.counts)])

    def used(self, shard: int) -> np.ndarray:
        """int64: the shard's rows that take part, ascending."""
        if self.within is None:
            return np.arange(self.index.shards[shard].count)
        return np.flatnonzero(self.within.mask(shard))

    def chunks(self, shard: int) -> Iterator[Chunk]:
        labels, positions = self.sidecar.labels(shard), self.index.members(shard).positions
        used = self.used(shard)
        height = max(1, _CHUNK_ENTRIES // max(1, self.classes))
        for start in range(0, len(used), height):
            rows = used[start : start + height]
            yield Chunk(rows, rows + self.first_ids[shard], positions[rows], labels.dense(self.classes, rows))

    def all_chunks(self) -> Iterator[Chunk]:
        for shard in range(len(self.index.shards)):
            yield from self.chunks(shard)

    @cached_property
    def order(self) -> np.ndarray:
        """int64: ids of the rows that take part, in the original order. 8 bytes a row."""
        ids, positions = [], []
        for shard in range(len(self.index.shards)):
            used = self.used(shard)
            ids.append(used + self.first_ids[shard])
            positions.append(self.index.members(shard).positions[used])
        if not ids:
            return np.zeros(0, np.int64)
        where = np.concatenate(positions)
        order = np.argsort(where, kind="stable")
        if np.any(np.diff(where[order]) == 0):
            raise UserError(f"{self.index.url}: its members tables give two samples the same place in the original "
                            f"order. Rebuild them with `lacuna shards index {self.index.url}`.")
        return np.concatenate(ids)[order]

    def gather(self) -> SparseLabels:
        """All shards' labels as one, by row id: compact, for draws that are inherently sequential."""
        parts = [self.sidecar.labels(shard) for shard in range(len(self.index.shards))]
        pos_ptr, pos_ids = _join([(p.pos_ptr, p.pos_ids) for p in parts])
        neg_ptr, neg_ids = _join([(p.neg_ptr, p.neg_ids) for p in parts])
        return SparseLabels(pos_ptr, pos_ids, neg_ptr, neg_ids, self.sidecar.unlisted)

    def masks(self, chosen: np.ndarray) -> list[np.ndarray]:
        """bool [rows] for every shard from row ids."""
        flags = np.zeros(int(self.first_ids[-1]), bool)
        flags[chosen] = True
        return np.split(flags, self.first_ids[1:-1]) if len(self.index.shards) else []


def cut_off(hashes: Callable[[], Iterable[np.ndarray]], wanted: Callable[[int], int]) -> tuple[np.uint64, int]:
    """(cut, count): exactly `count = wanted(total)` of the hashes are below `cut`, found in two passes.

    The first pass counts the upper 16 bits, the second collects only the bin in which the cut lies.
    """
    histogram = np.zeros(_HASH_BINS, np.int64)
    for part in hashes():
        histogram += np.bincount((part >> _BIN_SHIFT).astype(np.intp), minlength=_HASH_BINS)
    count = wanted(int(histogram.sum()))
    if count <= 0:
        return np.uint64(0), 0
    reached = np.cumsum(histogram)
    hit = int(np.searchsorted(reached, count))
    inside = np.concatenate([part[(part >> _BIN_SHIFT) == hit] for part in hashes()])
    last = count - int(reached[hit] - histogram[hit]) - 1
    return np.partition(inside, last)[last] + np.uint64(1), count


def _join(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(ptr) for ptr, _ in parts)])
    return np.cumsum(lengths), np.concatenate([np.zeros(0, np.int32), *(ids for _, ids in parts)])
