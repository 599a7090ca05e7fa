"""Oracles of `selection`: every label set by hand, and the integral at many nodes in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN

MANY = 256


def by_enumeration(logits, labels, q=None):
    """(−ln P, E[y]) of one row: sums over all 2^L label sets.

    Without q, m of the positives were shown; else each with its class's probability q [L].
    """
    p = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    labels = np.asarray(labels)
    m = int((labels == POSITIVE).sum())
    total, expected = 0.0, np.zeros(len(p))
    for y in itertools.product((0, 1), repeat=len(p)):
        y = np.array(y)
        if (y[labels == POSITIVE] == 0).any() or (y[labels == NEGATIVE] == 1).any():
            continue
        weight = math.prod(p[j] if y[j] else 1 - p[j] for j in range(len(p)))
        if q is None:
            weight /= math.comb(int(y.sum()), m)
        else:
            hidden = (y == 1) & (labels == UNKNOWN)
            weight *= math.prod(q[labels == POSITIVE]) * math.prod(1 - q[hidden])
        total += weight
        expected += weight * y
    return -math.log(total), expected / total


def log_likelihood(logits: torch.Tensor, labels: torch.Tensor, nodes: int = MANY) -> torch.Tensor:
    """ln P of one row where m positives were shown, differentiable, in float64."""
    m = int((labels == POSITIVE).sum())
    known = (torch.nn.functional.logsigmoid(logits[labels == POSITIVE]).sum()
             + torch.nn.functional.logsigmoid(-logits[labels == NEGATIVE]).sum())
    if not m:
        return known
    x, w = (torch.from_numpy(array) for array in _rule(nodes))
    t, weights = (x + 1) / 2, w / 2
    p = torch.sigmoid(logits[labels == UNKNOWN])
    inside = torch.log1p(-p * (1 - t)[:, None]).sum(1)
    return known + torch.logsumexp(torch.log(m * weights) + (m - 1) * torch.log(1 - t) + inside, 0)


_rules: dict[int, tuple[np.ndarray, np.ndarray]] = {}


def _rule(nodes):
    if nodes not in _rules:
        _rules[nodes] = np.polynomial.legendre.leggauss(nodes)
    return _rules[nodes]
