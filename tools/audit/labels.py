"""Findings about annotations: likely wrong ones of both kinds, classes that are confused, classes with too few labels.

Legend: n samples, L classes.
"""

from __future__ import annotations

import numpy as np

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE

_LEAST_CONFUSED = 10  # samples that a statement about two classes needs


def class_levels(beliefs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[L] each: the mean belief in entries annotated positive and in those annotated negative; NaN without any.

    What counts as high or low differs from class to class: these are the bars of confident learning (Northcutt et al.).
    """
    levels = []
    for kind in (POSITIVE, NEGATIVE):
        there = labels == kind
        count = there.sum(axis=0)
        sums = np.where(there, beliefs, 0).sum(axis=0, dtype=np.float64)
        levels.append(np.where(count > 0, sums / np.maximum(1, count), np.nan))
    return levels[0], levels[1]


def doubtful(beliefs: np.ndarray, labels: np.ndarray, levels: tuple[np.ndarray, np.ndarray] | None = None
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, classes, doubts) of annotated entries that look like the other kind, the most doubtful first.

    A positive whose belief is not above that of a usual negative, a negative that reaches that of a usual positive. The
    doubt is |label − belief|. Where a kind has no entry, nothing can be compared, and nothing is doubted.
    """
    high, low = levels or class_levels(beliefs, labels)
    with np.errstate(invalid="ignore"):
        wrong = ((labels == POSITIVE) & (beliefs <= low)) | ((labels == NEGATIVE) & (beliefs >= high) & (high > low))
    rows, classes = np.nonzero(wrong)
    doubts = np.where(labels[rows, classes] == POSITIVE, 1 - beliefs[rows, classes], beliefs[rows, classes])
    order = np.argsort(-doubts, kind="stable")
    return rows[order], classes[order], doubts[order]


def confused(beliefs: np.ndarray, labels: np.ndarray, share: float) -> list[tuple[int, int, float, int]]:
    """(a, b, share, samples): with a there and b not, the model believes more in b in such a share of the samples."""
    found = []
    for a in range(labels.shape[1]):
        has = labels[:, a] == POSITIVE
        absent = labels[has] == NEGATIVE
        counts = absent.sum(axis=0)
        more = (absent & (beliefs[has] > beliefs[has, a][:, None])).sum(axis=0)
        for b in np.flatnonzero((counts >= _LEAST_CONFUSED) & (more >= share * counts)):
            found.append((a, int(b), float(more[b] / counts[b]), int(counts[b])))
    return sorted(found, key=lambda row: (-row[2], row[0], row[1]))


def too_few(positives: np.ndarray, least: int) -> list[tuple[int, int]]:
    """(class, its annotated positives), the fewest first."""
    found = [(int(cls), int(positives[cls])) for cls in np.flatnonzero(positives < least)]
    return sorted(found, key=lambda row: (row[1], row[0]))
