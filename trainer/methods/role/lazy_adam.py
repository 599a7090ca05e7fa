"""Dense Adam on rows that are seen once an epoch, without touching the others.

Under dense Adam a row keeps moving by momentum while it is not in the batch. Lazily: a row stores (m, v, last step);
at its next visit the missed zero-gradient steps are replayed. The j-th missed step after step s moves by
    lr · m·β1^j/(1−β1^(s+j)) / (sqrt(v)·r_j + ε),   r_j = sqrt(β2^j/(1−β2^(s+j))),
and dies out like β1^j. r_j changes slowly, so steps are summed in a few segments of growing length with one mean r
each; the mean of 1/r is weighted so that the sum is exact both where ε is negligible and where it dominates.
Legend: B rows, L columns.
"""

from __future__ import annotations

import numpy as np
import torch

from lacuna.trainer.on_device.uploads import to_device

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
_LAST = 256  # β1^256 < 2e-12: later terms cannot be seen in float32
_EDGES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, _LAST])


def replay(phi: torch.Tensor, m: torch.Tensor, v: torch.Tensor, last: np.ndarray, now: int,
           lr: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(φ, m, v) [B, L] as dense Adam would have them after step `now`, given them after step last[b]."""
    missed = np.maximum(now - last, 0)
    if not missed.any():
        return phi, m, v
    on_host = [torch.from_numpy(a).to(phi.dtype) for a in _segments(last, missed)]
    weights, ratios = (to_device(part, phi.device) for part in on_host)
    root, moved = v.sqrt(), torch.zeros_like(phi)
    for i in np.flatnonzero(on_host[0].numpy().any(0)):
        moved += m * weights[:, i : i + 1] / (root * ratios[:, i : i + 1] + EPSILON)
    gap = to_device(missed.astype(np.float64), phi.device, phi.dtype)[:, None]
    return phi - lr * moved, m * BETA1**gap, v * BETA2**gap


def step(phi: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, now: torch.Tensor | int,
         lr: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adam's step number `now` (from 1; a scalar, or [B, 1] where rows count for themselves)."""
    m = BETA1 * m + (1 - BETA1) * gradient
    v = BETA2 * v + (1 - BETA2) * gradient**2
    update = (m / (1 - BETA1**now)) / ((v / (1 - BETA2**now)).sqrt() + EPSILON)
    return phi - lr * update, m, v


def _segments(last: np.ndarray, missed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Σ of first-moment weights, matching r) of every segment, float64 [B, segments]."""
    j = np.arange(1, _LAST + 1)
    number = last[:, None] + j[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = BETA1**j / (1 - BETA1**number)
        inverse = np.sqrt((1 - BETA2**number) / BETA2**j)  # 1/r
    weight = np.where(j[None] <= missed[:, None], weight, 0.0)
    sums = np.add.reduceat(weight, _EDGES[:-1], axis=1)
    means = np.add.reduceat(weight * inverse, _EDGES[:-1], axis=1)
    return sums, np.divide(sums, means, out=np.ones_like(sums), where=means > 0)
