"""What an answer about an entry is worth, and how a batch of questions is put together.

gain: unknown entries are mostly treated as negatives in training, so a "no" changes little and a "yes" repairs a label.
The worth of a question is the probability of a yes, times how different the image is from those already asked for this
class, times the need of the class, which falls as its positives (known ones, and expected ones of the batch) grow.
Legend: m candidates of a class, D feature width.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

LEAST_NOVELTY = 0.05  # of 1: nearer to a chosen image than that is a near-duplicate, and is not asked


def uncertainty(beliefs: np.ndarray) -> np.ndarray:
    """1 where the model has no idea, 0 where it is sure."""
    return 1 - np.abs(2 * beliefs - 1)


def need(positives: np.ndarray | float, typical: float) -> np.ndarray | float:
    """Worth of one more positive to a class that has so many; 1 for a class without any."""
    return 1 / np.sqrt(1 + positives / max(typical, 1.0))


def spread(beliefs: np.ndarray, vectors: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(places in the order to ask, worth of each): greedily the highest belief × novelty; near-duplicates are left out.

    Novelty of vectors [m, D] of length 1: 1 − the highest cosine to a chosen one (negative ones count as 0).
    """
    novelty = np.ones(len(beliefs))
    order, worth = [], []
    for _ in range(min(most, len(beliefs))):
        values = np.where(novelty >= LEAST_NOVELTY, beliefs * novelty, -1.0)
        at = int(values.argmax())
        if values[at] < 0:
            break
        order.append(at)
        worth.append(values[at])
        novelty = np.minimum(novelty, 1 - np.maximum(0, vectors @ vectors[at]))
        novelty[at] = 0
    return np.array(order, np.int64), np.array(worth)


def share_out(worths: list[np.ndarray], beliefs: list[np.ndarray], positives: np.ndarray, budget: int,
              may: Callable[[int, int], bool] = lambda cls, place: True) -> list[tuple[int, int]]:
    """(class, place in its order), the most valuable first: what each class asks next × how much it needs it.

    may: asked when a question's turn has come; one that may not be asked is passed over.
    """
    typical = float(np.median(positives)) if len(positives) else 1.0
    expected = positives.astype(np.float64)

    def offer(cls: int, place: int) -> tuple[float, int, int]:
        return (-float(worths[cls][place] * need(expected[cls], typical)), cls, place)

    heap = [offer(cls, 0) for cls in range(len(worths)) if len(worths[cls])]
    heapq.heapify(heap)
    chosen = list[tuple[int, int]]()
    while heap and len(chosen) < budget:
        _, cls, place = heapq.heappop(heap)
        if may(cls, place):
            chosen.append((cls, place))
            expected[cls] += beliefs[cls][place]
        if place + 1 < len(worths[cls]):
            heapq.heappush(heap, offer(cls, place + 1))
    return chosen
