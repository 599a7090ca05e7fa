"""Turns row-major batches of scores into blocks of class columns and ranks them block by block.

Only a block of columns exists beside the batches, never a transposed copy of all scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lacuna.trainer.metrics.ranking import ClassStats, rank_columns, to_ordered_keys

Batch = tuple[np.ndarray, np.ndarray]  # scores float32/float16 [B, L], targets int8 [B, L]
# Measured: 64 columns × 512 rows stay in the second-level cache while they are turned.
BLOCK_CLASSES = 64
TILE_ROWS = 512


def class_blocks(low: int, high: int, size: int = BLOCK_CLASSES) -> list[tuple[int, int]]:
    """Class ranges [low, high) in steps of at most `size`."""
    return [(a, min(a + size, high)) for a in range(low, high, size)]


def columns(batches: Sequence[Batch], low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys uint32 [b, N] and targets int8 [b, N] of classes low..high-1 over all batches' rows."""
    count = sum(len(scores) for scores, _ in batches)
    turned, labels = np.empty((high - low, count), np.float32), np.empty((high - low, count), np.int8)
    at = 0
    for scores, targets in batches:
        for start in range(0, len(scores), TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            width = len(scores[tile])
            turned[:, at : at + width] = scores[tile, low:high].T
            labels[:, at : at + width] = targets[tile, low:high].T
            at += width
    return to_ordered_keys(turned), labels


def rank_batches(batches: Sequence[Batch], ordinals: np.ndarray, classes: int, ungrouped: bool) -> ClassStats:
    """Results of all classes of one process's rows. (Measured: a second thread gains nothing.)"""
    return join_stats([rank_columns(*columns(batches, low, high), ordinals, ungrouped)
                       for low, high in class_blocks(0, classes)])


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
