"""Per-column histograms of quantised fields, 256 bins by the high byte of the code.

Legend: n rows, L columns. Entries that the caller excludes (verified negatives) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lacuna.state_store.fields import Constant, Field

BINS = 256
_FEW = 0.5  # fraction of changed entries below which counting them one by one is faster (measured)
Excluded = Callable[[int], tuple[np.ndarray, np.ndarray]]  # shard → (rows, columns) of entries outside the ranking


def bins_of(codes: np.ndarray) -> np.ndarray:
    return codes if codes.dtype == np.uint8 else (codes >> np.uint16(8)).astype(np.uint8)


def counts(codes: np.ndarray, excluded: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """int64 [L, 256] of codes [n, L]."""
    n, columns = codes.shape
    total = np.zeros(columns * BINS, np.int64)
    offset = np.arange(columns, dtype=np.int64) * BINS
    step = max(1, (1 << 17) // columns)
    for start in range(0, n, step):  # the int64 index of a block stays in the cache
        total += np.bincount((bins_of(codes[start : start + step]) + offset).reshape(-1), minlength=total.size)
    if excluded is not None and len(excluded[0]):
        rows, cols = excluded
        total -= np.bincount(bins_of(codes[rows, cols]) + offset[cols], minlength=total.size)
    return total.reshape(columns, BINS)


def change(before: np.ndarray, after: np.ndarray, excluded: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """counts(after) − counts(before); if few entries changed their bin (scores have settled) only they are counted."""
    old, new = bins_of(before), bins_of(after)
    moved = old != new
    if np.count_nonzero(moved) > _FEW * moved.size:
        return counts(after, excluded) - counts(before, excluded)
    if excluded is not None and len(excluded[0]):
        moved[excluded] = False
    at = np.flatnonzero(moved)
    columns = before.shape[1]
    start = (at % columns) * BINS
    total = np.bincount(start + new.reshape(-1)[at], minlength=columns * BINS)
    total -= np.bincount(start + old.reshape(-1)[at], minlength=columns * BINS)
    return total.reshape(columns, BINS)


def initial_counts(field: Field, seed: int, shard_counts: np.ndarray, given: Callable[[int], np.ndarray] | None,
                   excluded: Excluded | None) -> np.ndarray:
    """Histogram of the initial values: closed form for constants, else one sweep over the shards."""
    total = np.zeros((field.columns, BINS), np.int64)
    if isinstance(field.initial, Constant):
        codes = bins_of(field.initial_code())
        total[np.arange(field.columns), codes] = int(shard_counts.sum())
        for shard in range(len(shard_counts) if excluded is not None else 0):
            _, cols = excluded(shard)  # type: ignore[misc]
            total[np.arange(field.columns), codes] -= np.bincount(cols, minlength=field.columns)
        return total
    for shard, count in enumerate(shard_counts.tolist()):
        total += counts(field.initial_rows(seed, shard, count, given), excluded(shard) if excluded else None)
    return total
