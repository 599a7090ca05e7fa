"""From how much classes have to do with each other to a relation whose rows sum to 1, as SCPNet makes it.

Legend: S [L, L] likeness, at least 0; a row's neighbours are its K − 1 likest other classes and itself.
    r_ij = share · S_ij / Σ over the other neighbours of S_i·,   r_ii = 1 − share
    R_i· = softmax of r_i· / temperature over the neighbours;    temperature 0: r itself
"""

from __future__ import annotations

import numpy as np


def relation_of(likeness: np.ndarray, neighbors: int | None, share: float, temperature: float) -> np.ndarray:
    """float64 [L, L]. A class that is like no other keeps to itself; of equally like ones the first are taken."""
    classes = len(likeness)
    others = np.clip(likeness.astype(np.float64), 0, None)
    np.fill_diagonal(others, 0)
    if neighbors is not None and neighbors < classes:
        left_out = np.argsort(-others, axis=1, kind="stable")[:, max(neighbors - 1, 0):]
        np.put_along_axis(others, left_out, 0, axis=1)
    total = others.sum(1, keepdims=True)
    near = (others > 0) | np.eye(classes, dtype=bool)
    weights = np.divide(share * others, total, out=np.zeros_like(others), where=total > 0)
    np.fill_diagonal(weights, np.where(total[:, 0] > 0, 1 - share, 1))
    if temperature == 0:
        return weights
    powers = np.exp((weights - weights.max(1, keepdims=True)) / temperature) * near
    return powers / powers.sum(1, keepdims=True)
