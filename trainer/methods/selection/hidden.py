"""The integral over hidden positives: log ∫₀¹ m s^(m−1) Π_j (1 − p_j s) ds, and its derivative by every p_j.

It is E[1 / C(m + h, m)] for h positives among unknown classes that are positive with probabilities p_j.

Where to look. With s = exp(y) the integrand's logarithm has the slope m − f(s), f(s) = Σ_j p_j s / (1 − p_j s), so its
peak is where f = m (at s = 1 if f stays below m), and because f grows at least as fast as s, it falls on both
sides of the peak at least as fast as a Gamma(m) density does. That bounds the interval outside of which less than
exp(−FALL) is left, for any p; inside, few Gauss–Legendre nodes do, since the integrand is an entire function.

What to compute. The `LARGEST` likeliest classes enter exactly. Any other p_j is at most Σp / LARGEST, and s is of the
order m / Σp: p_j s is small, and `TERMS` power sums Σ p_j^k serve all nodes at once. So the cost for many classes
does not depend on the number of nodes, and every shape is known before the data is: a GPU need not wait for the host.

Legend: B rows, L classes, J the likeliest of them, K = TERMS (0 if all classes are among the likeliest), Q nodes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.trainer.methods.top_entries import top_entries

NODES = 20
LARGEST = 256
TERMS = 6
FALL = 14.0
_STEPS = 3  # towards the peak; each is exact for classes of equal p
_TINY = 1e-30


@dataclass(frozen=True)
class Hidden:
    """Probabilities of a block of rows, split into the likeliest classes and power sums of the rest."""

    p: torch.Tensor  # [B, L] 0 where the label is known
    columns: torch.Tensor | None  # int64 [B, J] of the likeliest; None: all L of them
    largest: torch.Tensor  # [B, J] their p
    rest: torch.Tensor  # [B, L] p without them
    sums: torch.Tensor  # [B, K] Σ p^k of the rest, k = 1 … K

    @classmethod
    def of(cls, p: torch.Tensor) -> Hidden:
        if p.shape[1] <= LARGEST:
            return cls(p, None, p, p, p[:, :0])
        largest, columns = top_entries(p, LARGEST)
        rest = p.scatter(1, columns, 0.0)
        sums, power = [rest.sum(1)], rest
        for _ in range(1, TERMS):
            power = power * rest if power is rest else power.mul_(rest)
            sums.append(power.sum(1))
        return cls(p, columns, largest, rest, torch.stack(sums, 1))

    def peak(self, m: torch.Tensor) -> torch.Tensor:
        """s [B, 1] in (0, 1) where f(s) = m, or nearly 1. A step matches f by a·s / (1 − b·s) and solves that."""
        s = m / (self.p.sum(1, keepdim=True) + m)  # a lower bound, since f(s) ≤ Σp·s / (1 − s)
        orders = _numbers(self.sums)
        for _ in range(_STEPS):
            x = self.largest * s
            odds = x.div_(1 - x)
            terms = self.sums * s**orders
            f = odds.sum(1, keepdim=True) + terms.sum(1, keepdim=True)
            curve = odds.square().sum(1, keepdim=True) + (terms * (orders - 1)).sum(1, keepdim=True)  # s f'(s) − f(s)
            s = (m * s * (f + curve) + _TINY) / (f * f + m * curve + _TINY)
            s = s.clamp(max=0.9999)  # f may be infinite at 1
        return s


def integrate(hidden: Hidden, m: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
    """The logarithm of the integral [B] for m [B, 1], at least 1.

    Fills `pull` [B, L] with −1 × its derivative by every p_j: the mean of s / (1 − p_j s) over the integrand.
    """
    low, high = interval(hidden.peak(m), m)
    abscissae, weights = _rule(NODES, m.device, m.dtype)
    s = low + (high - low) * abscissae
    powers = s[..., None] ** _numbers(hidden.sums)  # [B, Q, K]
    x = hidden.largest[:, None] * -s[..., None]  # [B, Q, J]
    none = torch.log1p(x).sum(2) - (powers @ (hidden.sums / _numbers(hidden.sums))[..., None])[..., 0]
    terms = torch.log(m * (high - low) * weights) + (m - 1) * torch.log(s) + none
    shares = torch.softmax(terms, 1)
    exact = ((shares * s)[:, None] @ x.add_(1).reciprocal_())[:, 0]
    if hidden.columns is None:
        pull.copy_(exact)
    else:
        moments = (shares[:, None] @ powers)[:, 0]
        pull.copy_(moments[:, -1:].expand_as(pull))
        for k in range(TERMS - 2, -1, -1):
            pull.mul_(hidden.rest).add_(moments[:, k : k + 1])
        pull.scatter_(1, hidden.columns, exact)
    return torch.logsumexp(terms, 1)


def interval(peak: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a Gamma(m) density around this peak is above exp(−FALL) of its height, cut off at 1."""
    ratio = FALL / m
    around = torch.sqrt(2 * ratio)
    return peak * (1 - around).clamp(min=0.0), (peak * (1 + around + ratio)).clamp(max=1.0)


def _numbers(sums: torch.Tensor) -> torch.Tensor:
    """1 … K, or none if there are no sums."""
    return _count(sums.shape[1], sums.device, sums.dtype)


# Kept on the device, so that a step uploads nothing.
@functools.lru_cache
def _count(terms: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1, terms + 1, device=device, dtype=dtype)


@functools.lru_cache
def _rule(nodes: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gauss–Legendre on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return torch.tensor((x + 1) / 2, device=device, dtype=dtype), torch.tensor(w / 2, device=device, dtype=dtype)
