"""Ternary labels: the only place where the numbers behind positive / negative / unknown are written.

Legend: n rows of one shard, B batch rows, L classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lacuna.basics.errors import UserError

POSITIVE = 1
NEGATIVE = 0
UNKNOWN = -1
_CHECKED_ROWS = 1 << 17
_LOWEST_ID = 1 << 31  # below 0: ids out of range are packed, too, and refused by `check`


@dataclass(frozen=True)
class SparseLabels:
    """Labels of n rows as compressed sparse rows; a class in neither list has the value `unlisted`.

    Row r's positive ids are `pos_ids[pos_ptr[r]:pos_ptr[r + 1]]`, ascending; negatives likewise.
    `unlisted` is NEGATIVE for fully annotated data (negatives need not be spelt out), else UNKNOWN.
    """

    pos_ptr: np.ndarray  # int64 [n + 1]
    pos_ids: np.ndarray  # int32
    neg_ptr: np.ndarray  # int64 [n + 1]
    neg_ids: np.ndarray  # int32
    unlisted: int = UNKNOWN

    @classmethod
    def from_lists(cls, positives, negatives, unlisted: int = UNKNOWN) -> SparseLabels:
        """Pack per-row id lists; ids are sorted and duplicates dropped."""
        pos_ptr, pos_ids = _pack(positives)
        neg_ptr, neg_ids = _pack(negatives)
        return cls(pos_ptr, pos_ids, neg_ptr, neg_ids, unlisted)

    @classmethod
    def from_dense(cls, dense: np.ndarray, unlisted: int = UNKNOWN) -> SparseLabels:
        """Pack an int8 [n, L] matrix of POSITIVE / NEGATIVE / UNKNOWN; negatives are kept unless implied."""
        pos_ptr, pos_ids = _pack_mask(dense == POSITIVE)
        listed_negative = (dense == NEGATIVE) if unlisted == UNKNOWN else np.zeros(dense.shape, bool)
        neg_ptr, neg_ids = _pack_mask(listed_negative)
        return cls(pos_ptr, pos_ids, neg_ptr, neg_ids, unlisted)

    @classmethod
    def joined(cls, parts: Sequence[SparseLabels], unlisted: int = UNKNOWN) -> SparseLabels:
        """The rows of all parts, in their order."""
        def one(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
            lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(ptr) for ptr, _ in pairs)])
            return np.cumsum(lengths), np.concatenate([np.zeros(0, np.int32), *(ids for _, ids in pairs)])

        return cls(*one([(part.pos_ptr, part.pos_ids) for part in parts]),
                   *one([(part.neg_ptr, part.neg_ids) for part in parts]), unlisted)

    def __len__(self) -> int:
        return len(self.pos_ptr) - 1

    def positives(self, row: int) -> np.ndarray:
        return self.pos_ids[self.pos_ptr[row] : self.pos_ptr[row + 1]]

    def negatives(self, row: int) -> np.ndarray:
        return self.neg_ids[self.neg_ptr[row] : self.neg_ptr[row + 1]]

    def take(self, rows: np.ndarray) -> SparseLabels:
        """The labels of the given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        pos_ptr, pos_ids = _gather(self.pos_ptr, self.pos_ids, rows)
        neg_ptr, neg_ids = _gather(self.neg_ptr, self.neg_ids, rows)
        return SparseLabels(pos_ptr, pos_ids, neg_ptr, neg_ids, self.unlisted)

    def dense(self, classes: int, rows: np.ndarray | None = None) -> np.ndarray:
        """int8 [B, L] for the given rows (all rows by default)."""
        rows = np.arange(len(self)) if rows is None else np.asarray(rows, dtype=np.int64)
        out = np.full((len(rows), classes), self.unlisted, dtype=np.int8)
        self.paint(out, np.arange(len(rows)), rows)
        return out

    def paint(self, out: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
        """Write what is listed for the given rows into the given places of an int8 [B, L] that is `unlisted` so far."""
        for ptr, ids, value in ((self.neg_ptr, self.neg_ids, NEGATIVE), (self.pos_ptr, self.pos_ids, POSITIVE)):
            if len(ids):
                taken, found = _gather(ptr, ids, rows)
                out[np.repeat(places, np.diff(taken)), found] = value

    def class_counts(self, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """(positives, negatives) per class, int64 [L] each; unlisted negatives are counted."""
        pos = np.bincount(self.pos_ids, minlength=classes).astype(np.int64)
        if self.unlisted == NEGATIVE:
            return pos, len(self) - pos
        return pos, np.bincount(self.neg_ids, minlength=classes).astype(np.int64)

    def check(self, classes: int, where: str) -> None:
        """Raise a UserError that names the first row with an id out of range or a label conflict."""
        for kind, ptr, ids in (("positive", self.pos_ptr, self.pos_ids), ("negative", self.neg_ptr, self.neg_ids)):
            bad = np.flatnonzero((ids < 0) | (ids >= classes))
            if len(bad):
                row = int(np.searchsorted(ptr, bad[0], side="right") - 1)
                raise UserError(
                    f"{where}: row {row} has {kind} class id {int(ids[bad[0]])}, but the class list has ids "
                    f"0..{classes - 1}. Fix the label or the class list."
                )
        if not len(self.neg_ids):
            return
        # Block by block: the codes of sixty million labels would take gigabytes.
        for start in range(0, len(self), _CHECKED_ROWS):
            stop = min(start + _CHECKED_ROWS, len(self))
            clash = np.intersect1d(_entry_codes(self.pos_ptr[start:stop + 1], self.pos_ids, classes),
                                   _entry_codes(self.neg_ptr[start:stop + 1], self.neg_ids, classes))
            if len(clash):
                row, cls = divmod(int(clash[0]), classes)
                raise UserError(f"{where}: row {start + row} has class id {cls} as positive and as negative. "
                                "Remove one of the two.")


def _pack(lists) -> tuple[np.ndarray, np.ndarray]:
    """In one go: an array per row of a million rows takes more memory than all labels."""
    lists = lists if isinstance(lists, Sequence) else list(lists)
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    ids = np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum()))
    # Row above, id below (from 0 on, whatever its sign): sorted, and each once.
    codes = np.unique(np.repeat(np.arange(len(lists)), lengths) << 32 | ids.astype(np.int64) + _LOWEST_ID)
    ptr = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum(np.bincount(codes >> 32, minlength=len(lists)), out=ptr[1:])
    return ptr, ((codes & 0xFFFFFFFF) - _LOWEST_ID).astype(np.int32)


def _pack_mask(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ptr = np.zeros(len(mask) + 1, dtype=np.int64)
    np.cumsum(mask.sum(axis=1), out=ptr[1:])
    return ptr, np.nonzero(mask)[1].astype(np.int32)


def _gather(ptr: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = ptr[rows + 1] - ptr[rows]
    taken = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=taken[1:])
    within = np.arange(taken[-1]) - np.repeat(taken[:-1], lengths)
    return taken, ids[np.repeat(ptr[rows], lengths) + within]


def _entry_codes(ptr: np.ndarray, ids: np.ndarray, classes: int) -> np.ndarray:
    """row * classes + id of every entry of the rows that `ptr` bounds."""
    return np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)) * classes + ids[ptr[0]:ptr[-1]]
