"""EN with a number of positives for every image: cardinality-constrained selection, our own.

What we know of "Single-Positive Multi-Label Learning with Label Cardinality" (Gharib et al., TMLR 2025) is that numbers
of positives are matched to images by sorting; its losses are not at hand, so this is not that method. Here, at an
epoch's start, the images are sorted by their predicted number of positives (the sum of their running scores), and the
numbers 1, 2, 3, … are dealt out in that order, as many of each as the given shares say. Of an image with k_n positives
the k_n − (annotated ones) highest running scores among its unknown entries are expected positives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lacuna.trainer.methods.base import EpochStart, positive, unknown
from lacuna.trainer.metrics.exchange import Peers
from lacuna.trainer.on_device.uploads import to_device
from lacuna.trainer.state_rows import StateRows


@dataclass(frozen=True)
class Cardinalities:
    """k_n = 1 + how many bounds lie below (predicted count, sample number), compared in that order."""

    bounds: np.ndarray  # int64 [K − 1, 2], ascending; counts in units of the stored scores
    max_rows: int  # of the longest shard: sample number = shard · max_rows + row

    def of(self, counts: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """int64 [B]."""
        below = (self.bounds[:, 0] < counts[:, None]) | ((self.bounds[:, 0] == counts[:, None])
                                                         & (self.bounds[:, 1] < samples[:, None]))
        return 1 + below.sum(1)

    def expected(self, rows: StateRows, field: str, labels: torch.Tensor) -> torch.Tensor:
        """bool [B, L]: annotated positives and the best of the unknown entries, k_n together."""
        codes, scores = rows.codes(field).astype(np.int64), rows.read(field)
        k = to_device(self.of(codes.sum(1), rows.samples(self.max_rows)), scores.device)
        ranked = torch.where(unknown(labels), scores, -1.0).sort(dim=1, descending=True, stable=True).indices
        room = k - positive(labels).sum(1)
        place = torch.arange(scores.shape[1], device=scores.device).expand_as(ranked)
        best = torch.zeros_like(labels, dtype=torch.bool).scatter(1, ranked, place < room[:, None])
        return positive(labels) | (best & unknown(labels))


def matched(start: EpochStart, field: str, shares: tuple[float, ...]) -> Cardinalities:
    """Deal the numbers of positives out; 16 bytes a sample are held on every rank meanwhile."""
    world, longest = start.world, start.state.longest

    def sums(shard: int, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        return np.stack([scores.astype(np.int64).sum(1), shard * longest + rows], 1)

    parts = list(start.state.map_rows([field], sums))
    mine = np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)
    every = np.concatenate(Peers(world.control if world.size > 1 else None).gather(mine)).reshape(-1, 2)
    every = every[np.lexsort((every[:, 1], every[:, 0]))]
    ends = np.rint(np.cumsum(shares)[:-1] / np.sum(shares) * len(every)).astype(np.int64)
    lowest = np.full((1, 2), -1)  # below every sample: nobody has the number before it
    return Cardinalities(np.concatenate([lowest, every])[ends], longest)
