"""Findings about samples by their features: near-duplicates within and across splits, and outliers.

Distances are Euclidean between vectors of length 1. What is near depends on the features, so it is measured in the
usual distance between nearest neighbours of the training set.
Legend: n samples, D feature width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

_QUERIES, _BASE = 512, 16384
NEIGHBORS = 5


def nearest(queries: np.ndarray, base: np.ndarray, k: int, same: bool,
            advance: Callable[[int], None] = lambda _: None) -> tuple[np.ndarray, np.ndarray]:
    """(places int64 [q, k], distances float32 [q, k]) in the base; `same`: both are one set, and none is its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    places = np.zeros((len(queries), k), np.int64)
    distances = np.full((len(queries), k), np.inf, np.float32)
    for start in range(0, len(queries), _QUERIES):
        asked = torch.from_numpy(queries[start : start + _QUERIES].astype(np.float32)).to(device)
        best_far = torch.full((len(asked), 0), torch.inf, device=device)
        best_at = torch.zeros((len(asked), 0), dtype=torch.int64, device=device)
        for first in range(0, len(base), _BASE):
            block = torch.from_numpy(base[first : first + _BASE].astype(np.float32)).to(device)
            at = (asked @ block.T).topk(min(k + same, len(block)), dim=1).indices
            # Once more by differences: √(2 − 2·similarity) of near-duplicates would have three digits.
            far = (asked[:, None] - block[at]).square().sum(2).sqrt()
            at = at + first
            if same:
                far = far.masked_fill(at == torch.arange(start, start + len(asked), device=device)[:, None], torch.inf)
            best_far, best_at = torch.cat([best_far, far], 1), torch.cat([best_at, at], 1)
            order = best_far.argsort(dim=1, stable=True)[:, :k]
            best_far, best_at = best_far.gather(1, order), best_at.gather(1, order)
        found = best_far.shape[1]
        places[start : start + len(asked), :found] = best_at.cpu().numpy()
        distances[start : start + len(asked), :found] = best_far.cpu().numpy()
        advance(len(asked))
    return places, distances


def twins(places: np.ndarray, distances: np.ndarray, limit: float) -> list[tuple[int, int, float]]:
    """(query, base, distance) of all pairs at most `limit` apart, the nearest first."""
    rows, columns = np.nonzero(distances <= limit)
    found = [(int(r), int(places[r, c]), float(distances[r, c])) for r, c in zip(rows, columns, strict=True)]
    return sorted(found, key=lambda pair: (pair[2], pair[0], pair[1]))


def outliers(distances: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """(samples, how many spreads above the median) by the mean distance to their neighbours, the farthest first.

    The spread is the median absolute deviation: a few outliers do not move it.
    """
    finite = np.isfinite(distances)
    means = np.where(finite, distances, 0).sum(1) / np.maximum(1, finite.sum(1))
    middle = np.median(means)
    spread = max(float(np.median(np.abs(means - middle))), 1e-12)
    away = (means - middle) / spread
    rows = np.flatnonzero(away > factor)
    order = rows[np.argsort(-away[rows], kind="stable")]
    return order, away[order]
