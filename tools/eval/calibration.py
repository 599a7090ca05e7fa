"""Scores as probabilities: a rising curve per class, fitted on fully labelled images, and how far off scores are (ECE).

The curve is σ(slope · log-odds of the score + offset), slope > 0: the ranking of a class stays as it is. Classes
with few positives stay near the curve of all classes together. Fitting needs counts per class and bin of log-odds only.
Legend: B rows, L classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN

_EDGE = 1e-7  # scores nearer to 0 or 1 count as this near
_BINS, _WIDEST = 400, 16.2  # of log-odds; that of _EDGE is 16.12
_ECE_BINS = 15
_SLOPE_SPREAD, _OFFSET_SPREAD = 0.25, 1.0  # how far a class may stray from all classes; the slope in parts of theirs
_FLATTEST = 0.05  # a curve never falls, nor is it level


@dataclass(frozen=True)
class Calibration:
    slopes: np.ndarray  # float64 [L], positive
    offsets: np.ndarray  # float64 [L]

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Probabilities float32 [B, L] of scores [B, L]."""
        return self.of_tensor(torch.from_numpy(np.ascontiguousarray(scores, np.float32))).numpy()

    def of_tensor(self, scores: torch.Tensor) -> torch.Tensor:
        slopes, offsets = (torch.from_numpy(part).to(scores.device, scores.dtype) for part in
                           (self.slopes, self.offsets))
        return torch.sigmoid(slopes * torch.logit(scores, _EDGE) + offsets)


class Odds:
    """How often scores of every log-odds were right, of any number of rows."""

    def __init__(self, classes: int):
        self.counts = np.zeros((2, classes, _BINS), np.int64)  # of positives, of negatives
        self.complete = True  # no entry was unknown

    def add(self, scores: np.ndarray, targets: np.ndarray) -> None:
        """Scores [B, L] and ternary targets [B, L]."""
        self.complete &= not (targets == UNKNOWN).any()
        bins = np.clip((_log_odds(scores) + _WIDEST) * (_BINS / (2 * _WIDEST)), 0, _BINS - 1).astype(np.int64)
        bins += np.arange(bins.shape[1]) * _BINS
        for number, kind in enumerate((POSITIVE, NEGATIVE)):
            found = np.bincount(bins[targets == kind], minlength=self.counts[0].size)
            self.counts[number] += found.reshape(self.counts[number].shape)

    def fit(self) -> Calibration | None:
        """The likeliest curves; None where labels were incomplete or nothing was seen."""
        if not self.complete or not self.counts.any():
            return None
        every = self.counts.sum(1, keepdims=True)
        slope, offset = (float(part[0]) for part in _fit(every, 1.0, 0.0))
        return Calibration(*_fit(self.counts, slope, offset))


class Reliability:
    """Expected calibration error: how far the scores of a bin are from how often they are right."""

    def __init__(self, classes: int):
        self.sums = np.zeros((3, classes, _ECE_BINS))  # rows, scores, positives

    def add(self, scores: np.ndarray, targets: np.ndarray) -> None:
        """Scores [B, L] and ternary targets [B, L]; unknown entries do not count."""
        known = targets != UNKNOWN
        bins = np.minimum((scores * _ECE_BINS).astype(np.int64), _ECE_BINS - 1) + np.arange(scores.shape[1]) * _ECE_BINS
        for number, weights in enumerate((np.ones_like(scores), scores, targets == POSITIVE)):
            found = np.bincount(bins[known], weights[known], self.sums[0].size)
            self.sums[number] += found.reshape(self.sums[number].shape)

    def error(self) -> float:
        """Percent: Σ over bins of |scores − positives| / rows, the mean over classes that have rows."""
        rows, scores, positives = self.sums
        there = rows.sum(1) > 0
        if not there.any():
            return float("nan")
        return 100 * float((np.abs(scores - positives).sum(1)[there] / rows.sum(1)[there]).mean())


def _log_odds(scores: np.ndarray) -> np.ndarray:
    near = np.clip(scores.astype(np.float64), _EDGE, 1 - _EDGE)
    return np.log(near) - np.log1p(-near)


def _fit(counts: np.ndarray, slope: float, offset: float) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method for all classes at once, slopes held above _FLATTEST; the priors make every problem convex."""
    odds = (np.arange(_BINS) + 0.5) * (2 * _WIDEST / _BINS) - _WIDEST
    positives, rows = counts[0], counts.sum(0)
    weights = 1 / (_SLOPE_SPREAD * slope) ** 2, 1 / _OFFSET_SPREAD**2
    a, b = np.full(len(rows), slope), np.full(len(rows), offset)
    for _ in range(100):
        p = 1 / (1 + np.exp(-(a[:, None] * odds + b[:, None])))
        wrong, curved = rows * p - positives, rows * p * (1 - p)
        gradient = np.stack([wrong @ odds + weights[0] * (a - slope), wrong.sum(1) + weights[1] * (b - offset)])
        aa, ab, bb = curved @ odds**2 + weights[0], curved @ odds, curved.sum(1) + weights[1]
        # At the flattest slope only the offset may move.
        held = (a <= _FLATTEST) & (gradient[0] > 0)
        determinant = aa * bb - ab**2
        step_a = np.where(held, 0.0, (bb * gradient[0] - ab * gradient[1]) / determinant)
        step_b = np.where(held, gradient[1] / bb, (aa * gradient[1] - ab * gradient[0]) / determinant)
        length = np.maximum(1.0, np.maximum(np.abs(step_a) / slope, np.abs(step_b)))  # far steps overshoot
        a, b = np.maximum(a - step_a / length, _FLATTEST), b - step_b / length
        if max(np.abs(step_a).max(), np.abs(step_b).max()) < 1e-9:
            break
    return a, b
