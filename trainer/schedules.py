"""Learning rate as a pure function of the step: nothing to save, the same after every resume."""

from __future__ import annotations

import math


def lr_factor(schedule: str, step: int, total: int, warmup: int) -> float:
    """What the phase's lr is multiplied with at `step` (0-based) of `total`."""
    if schedule == "one_cycle":
        return _one_cycle(step, total, warmup)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1 + math.cos(math.pi * done))


def _one_cycle(step: int, total: int, warmup: int) -> float:
    """The lr of torch's OneCycleLR with its defaults: cosine from 1/25 up to 1, then down to 1/(25e4)."""
    start, end = 1 / 25, 1 / 25e4
    peak = max(1, warmup) - 1
    if step <= peak:
        return _cosine(start, 1.0, step / max(1, peak))
    return _cosine(1.0, end, (step - peak) / max(1, total - 1 - peak))


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * part))
