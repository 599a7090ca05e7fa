"""Turns row-major batches of scores into blocks of class columns and ranks them block by block.

Only a block of columns exists beside the batches, never a transposed copy of all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from lacuna.data_pipelines.labels import POSITIVE
from lacuna.trainer.metrics.ranking import ClassStats, rank_annotated, rank_columns, some_unknown, to_ordered_keys

Batch = tuple[np.ndarray, np.ndarray]  # scores float32/float16 [B, L], targets int8 [B, L]
# Measured: 64 columns × 512 rows stay in the second-level cache while they are turned.
BLOCK_CLASSES = 64
TILE_ROWS = 512


def class_blocks(low: int, high: int, size: int = BLOCK_CLASSES) -> list[tuple[int, int]]:
    """Class ranges [low, high) in steps of at most `size`."""
    return [(a, min(a + size, high)) for a in range(low, high, size)]


def columns(batches: Sequence[Batch], low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys uint32 [b, N] and targets int8 [b, N] of classes low..high-1 over all batches' rows."""
    return _keys(batches, low, high), _turned([targets for _, targets in batches], low, high, np.int8)


def _keys(batches: Sequence[Batch], low: int, high: int) -> np.ndarray:
    return to_ordered_keys(_turned([scores for scores, _ in batches], low, high, np.float32))


def _turned(parts: Sequence[np.ndarray], low: int, high: int, kind: type) -> np.ndarray:
    out: np.ndarray = np.empty((high - low, sum(map(len, parts))), kind)
    at = 0
    for part in parts:
        for start in range(0, len(part), TILE_ROWS):
            tile = part[start : start + TILE_ROWS, low:high]
            out[:, at : at + len(tile)] = tile.T
            at += len(tile)
    return out


def rank_batches(batches: Sequence[Batch], ordinals: np.ndarray, classes: int, ungrouped: bool) -> ClassStats:
    """Results of all classes of one process's rows, by as many threads as torch has."""
    positives = _positives(batches, classes)

    def rank(block: tuple[int, int]) -> ClassStats:
        low, high = block
        if positives is None:
            return rank_columns(*columns(batches, low, high), ordinals, ungrouped)
        return rank_annotated(_keys(batches, low, high), positives[low:high], ordinals, ungrouped)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return join_stats(list(threads.map(rank, class_blocks(0, classes))))


def _positives(batches: Sequence[Batch], classes: int) -> list[np.ndarray] | None:
    """Rows of every class's positives, ascending: few beside all targets, which then need not be turned. None where
    something is unknown, for such entries are outside the ranking."""
    if any(some_unknown(targets) for _, targets in batches):
        return None
    first = np.cumsum([0, *(len(targets) for _, targets in batches)])
    found = [np.flatnonzero(targets == POSITIVE) + start * classes
             for start, (_, targets) in zip(first, batches, strict=False)]
    rows, owners = np.divmod(np.concatenate([np.zeros(0, np.int64), *found]), classes)
    ends = np.cumsum(np.bincount(owners, minlength=classes))
    return np.split(rows[np.argsort(owners, kind="stable")], ends[:-1])


def rank_doubles(scores: np.ndarray, targets: np.ndarray, ordinals: np.ndarray, ungrouped: bool) -> ClassStats:
    """Results of scores wider than float32 [N, L]: a key is the place of the score among its class's distinct ones."""
    parts = []
    for cls in range(scores.shape[1]):
        levels, places = np.unique(scores[:, cls], return_inverse=True)
        parts.append(rank_columns(places.astype(np.uint32)[None], targets[None, :, cls], ordinals, ungrouped, levels))
    return join_stats(parts)


def join_stats(parts: Sequence[ClassStats]) -> ClassStats:
    """Results of consecutive class ranges as one."""
    if not parts:
        return ClassStats.from_matrix(np.zeros((6, 0)))
    return ClassStats.from_matrix(np.concatenate([p.to_matrix() for p in parts], axis=1))
