"""Where every positive stands in its class's ranking: the counts behind average precision and best F1, exact and fast.

Average precision needs only the positives: for each, how many annotated entries and how many positives score at least
as high. A dense column is therefore not sorted. Its scores become order-preserving 32-bit keys; one histogram over the
upper 16 bits counts everything above a positive's bin, and only the bins that hold a positive are sorted.
Sparse entries take one sort of (class, score). Both ways end in the same numbers, added in the same order.

Legend: N rows, L classes, b classes of one block, P positives of a block, E annotated entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN

_BINS = 1 << 16
_SIGN = np.uint32(1 << 31)
_FLIP = np.int32(-(1 << 31))
_KEY = np.uint64(0xFFFFFFFF << 32)  # the score's part of a code
# The published ungrouped variant divides by (positives + this).
_UNGROUPED_EPSILON = 1e-8


@dataclass(frozen=True)
class ClassStats:
    """Per-class results, each array [L]; a class without positives has NaN scores and an infinite threshold."""

    ap: np.ndarray  # float64, tied scores form one group (scikit-learn's rule)
    ap_ungrouped: np.ndarray  # float64, ties in the order of a reversed stable argsort; NaN when not asked for
    best_f1: np.ndarray  # float64, over all thresholds
    thresholds: np.ndarray  # float64, the highest score at which best_f1 is reached: predict score >= threshold
    positives: np.ndarray  # int64
    negatives: np.ndarray  # int64

    def to_matrix(self) -> np.ndarray:
        """float64 [6, L]: exact for counts below 2^53, so one message carries all."""
        return np.stack([getattr(self, name).astype(np.float64) for name in self.__dataclass_fields__])

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> ClassStats:
        ap, ungrouped, f1, thresholds, positives, negatives = matrix
        return cls(ap, ungrouped, f1, thresholds, positives.astype(np.int64), negatives.astype(np.int64))


def ordered_keys(scores: np.ndarray) -> np.ndarray:
    """uint32 keys in the order of the scores (float32 or float16); equal scores, and 0.0 and -0.0, get equal keys."""
    return to_ordered_keys(np.array(scores, dtype=np.float32, order="C", ndmin=2)).reshape(scores.shape)


def to_ordered_keys(scores: np.ndarray) -> np.ndarray:
    """The keys of a float32 matrix, written over it."""
    bits = scores.view(np.int32)
    for row, bit in zip(scores, bits, strict=True):  # row by row, so that a row stays in the cache
        row += np.float32(0)  # -0.0 becomes 0.0
        bit ^= (bit >> 31) | _FLIP  # negative numbers: flip all bits; others: set the sign bit
    return bits.view(np.uint32)


def scores_of(keys: np.ndarray) -> np.ndarray:
    """float32: the inverse of ordered_keys."""
    return np.where(keys & _SIGN, keys ^ _SIGN, ~keys).astype(np.uint32).view(np.float32)


def rank_columns(keys: np.ndarray, targets: np.ndarray, ordinals: np.ndarray, ungrouped: bool,
                 levels: np.ndarray | None = None) -> ClassStats:
    """Results of b classes from keys uint32 [b, N] and targets int8 [b, N]; ordinals int64 [N] order tied rows.

    `levels`: the scores that keys are places of, where they do not come from `ordered_keys`.
    """
    places = _places(ordinals)
    return _of_columns([_rank_column(k, t, places) for k, t in zip(keys, targets, strict=True)], ungrouped, levels)


def rank_annotated(keys: np.ndarray, positives: list[np.ndarray], ordinals: np.ndarray, ungrouped: bool) -> ClassStats:
    """The same where nothing is unknown, from the rows of every class's positives, ascending."""
    places = _places(ordinals)
    return _of_columns([_rank_positives(k, at, places) for k, at in zip(keys, positives, strict=True)], ungrouped)


def _of_columns(ranks: list[_Ranks], ungrouped: bool, levels: np.ndarray | None = None) -> ClassStats:
    positives = np.array([len(r.keys) for r in ranks], np.int64)
    annotated = np.array([r.annotated for r in ranks], np.int64)
    return _reduce(_join(ranks), positives, annotated, ungrouped, levels)


def rank_entries(classes: np.ndarray, keys: np.ndarray, positive: np.ndarray, ordinals: np.ndarray,
                 count: int) -> ClassStats:
    """Results of classes 0..count-1 from E annotated entries in any order (int, uint32, bool, int64)."""
    if len(ordinals) and np.any(ordinals[1:] < ordinals[:-1]):
        order = np.argsort(ordinals, kind="stable")
        classes, keys, positive = classes[order], keys[order], positive[order]
    # Descending score within a class; the stable sort of the reversed entries puts the later row of a tie first.
    codes = ((classes.astype(np.uint64) << np.uint64(32)) | ~keys)[::-1]
    order = np.argsort(codes, kind="stable")
    codes, hit = codes[order], positive[::-1][order]
    owner = (codes >> np.uint64(32)).astype(np.int64)
    annotated = np.bincount(owner, minlength=count).astype(np.int64)
    positives = np.bincount(owner[hit], minlength=count).astype(np.int64)
    first = np.cumsum(annotated) - annotated
    first_positive = np.cumsum(positives) - positives
    at = np.flatnonzero(hit)
    mine, code = owner[at], codes[at]
    # Entries up to the end of a tie group, and positives likewise.
    rank = np.searchsorted(codes, code, side="right") - first[mine]
    tp = np.searchsorted(code, code, side="right") - first_positive[mine]
    ranked = _Ranks(~(code & np.uint64(0xFFFFFFFF)).astype(np.uint32), tp, rank, at + 1 - first[mine], 0)
    return _reduce(ranked, positives, annotated, ungrouped=True)


@dataclass(frozen=True)
class _Ranks:
    """P positives, class by class, highest score first."""

    keys: np.ndarray  # uint32 [P]
    tp: np.ndarray  # int64 [P]: positives with at least this score
    rank: np.ndarray  # int64 [P]: annotated entries with at least this score
    strict_rank: np.ndarray  # int64 [P]: place in the ranking when ties are broken by row order
    annotated: int


def _join(ranks: list[_Ranks]) -> _Ranks:
    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(r, name) for r in ranks])

    return _Ranks(column("keys"), column("tp"), column("rank"), column("strict_rank"), 0)


def _rank_column(keys: np.ndarray, target: np.ndarray, places: np.ndarray) -> _Ranks:
    if some_unknown(target):
        known = np.flatnonzero(target != UNKNOWN)
        keys, target, places = keys[known], target[known], places[known]
    return _rank_positives(keys, np.flatnonzero(target == POSITIVE), places)


def some_unknown(targets: np.ndarray) -> bool:
    return bool(targets.min(initial=POSITIVE) == UNKNOWN)  # the least of the three; a comparison would take a copy


def _rank_positives(keys: np.ndarray, at: np.ndarray, places: np.ndarray) -> _Ranks:
    """Of one class: keys of all annotated entries, where the positives are among them."""
    annotated = len(keys)
    if not len(at):
        return _Ranks(np.zeros(0, np.uint32), *(np.zeros(0, np.int64),) * 3, annotated)
    mine = np.sort(_codes(keys[at], places[at]))
    high = (keys >> np.uint32(16)).astype(np.intp)
    counts = np.bincount(high, minlength=_BINS)
    own = (mine >> np.uint64(48)).astype(np.intp)
    new = np.concatenate([[True], own[1:] != own[:-1]])
    bins, bin_of = own[new], np.cumsum(new) - 1
    # reduceat sums the histogram from one such bin to the next: a short reversed cumsum gives "this bin or higher".
    at_or_above = np.cumsum(np.add.reduceat(counts, bins)[::-1])[::-1]
    inside = counts[bins]
    chosen = np.zeros(_BINS, bool)
    chosen[bins] = True
    near = np.flatnonzero(chosen.take(high))
    candidates = np.sort(_codes(keys[near], places[near]))
    # Candidates are exactly the members of those bins, so a bin ends at the running sum of its sizes.
    top = (at_or_above - inside + np.cumsum(inside))[bin_of]
    score = mine & _KEY
    rank = top - np.searchsorted(candidates, score)
    strict = top - np.searchsorted(candidates, mine)
    tp = len(mine) - np.searchsorted(mine, score)
    return _Ranks((mine >> np.uint64(32)).astype(np.uint32)[::-1], tp[::-1], rank[::-1], strict[::-1], annotated)


def _codes(keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """uint64: the key above the row's place, so that one sort orders by score and, among ties, by row."""
    return (keys.astype(np.uint64) << np.uint64(32)) | places


def _places(ordinals: np.ndarray) -> np.ndarray:
    """uint64 [N]: 0 for the row with the smallest ordinal, and so on."""
    places = np.arange(len(ordinals), dtype=np.uint64)
    if np.any(ordinals[1:] < ordinals[:-1]):
        order = np.argsort(ordinals, kind="stable")
        places[order] = places.copy()
    return places


def _reduce(ranked: _Ranks, positives: np.ndarray, annotated: np.ndarray, ungrouped: bool,
            levels: np.ndarray | None = None) -> ClassStats:
    """Sums per class; bincount adds one after the other, so the result does not depend on how classes are blocked."""
    count = len(positives)
    owner = np.repeat(np.arange(count), positives)
    some = positives > 0
    first = (np.cumsum(positives) - positives)[some]
    divisor = np.where(some, positives, np.nan)
    ap = np.bincount(owner, weights=ranked.tp / ranked.rank, minlength=count) / divisor
    strict = np.full(count, np.nan)
    if ungrouped:
        place = np.arange(1, len(owner) + 1) - (np.cumsum(positives) - positives)[owner]
        precision = place / ranked.strict_rank
        strict = np.bincount(owner, weights=precision, minlength=count) / (divisor + _UNGROUPED_EPSILON)
    best, thresholds = np.full(count, np.nan), np.full(count, np.inf)
    if len(owner):
        f1 = 2.0 * ranked.tp / (ranked.rank + positives[owner])
        best[some] = np.maximum.reduceat(f1, first)
        reached = np.flatnonzero(f1 == best[owner])
        _, index = np.unique(owner[reached], return_index=True)
        keys = ranked.keys[reached[index]]
        thresholds[some] = scores_of(keys) if levels is None else levels[keys]
    return ClassStats(ap, strict, best, thresholds, positives, annotated - positives)
