"""Scores of an evaluation stay on the device until a block is full: the host waits once per block, not per batch."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

BLOCK_BYTES = 64 << 20


class Collects(Protocol):
    def add(self, scores, targets, keep=None, ordinals=None) -> None: ...


class ScoreBlock:
    """Hands scores on to the collector, batch by batch in the same order; on a CPU at once."""

    def __init__(self, collector: Collects, most: int = BLOCK_BYTES):
        self.collector, self.most, self.bytes = collector, most, 0
        self.waiting: list[tuple[torch.Tensor, torch.Tensor, np.ndarray]] = []

    def add(self, scores: torch.Tensor, labels: torch.Tensor, ordinals: np.ndarray) -> None:
        self.waiting.append((scores, labels, ordinals))
        self.bytes += scores.numel() * scores.element_size()
        if scores.device.type == "cpu" or self.bytes >= self.most:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        sizes = [len(scores) for scores, _, _ in self.waiting]
        every = [scores for scores, _, _ in self.waiting]
        on_host = (every[0] if len(every) == 1 else torch.cat(every)).cpu().split(sizes)
        for scores, (_, labels, ordinals) in zip(on_host, self.waiting, strict=True):
            self.collector.add(scores, labels, ordinals=ordinals)
        self.waiting, self.bytes = [], 0
