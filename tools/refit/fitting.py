"""The head's rows trained again, each class for itself and on its known labels alone (CFT, Chen et al. 2023).

Legend: N samples, D inputs of the head, L classes. Every class starts at its row (w, b) and takes full-batch steps of
Adam on its known entries; the row with the best average precision on validation samples is kept, the first one
included. Adam treats every number by itself, so all classes can take their steps at once and still not touch another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods.asl import Asl, AslSettings
from lacuna.trainer.methods.base import Task
from lacuna.trainer.metrics.measures import average_precision


@dataclass(frozen=True)
class Samples:
    inputs: torch.Tensor  # float32 [N, D], what enters the head
    labels: np.ndarray  # int8 [N, L]

    def both(self) -> np.ndarray:
        """bool [L]: classes with a known positive and a known negative."""
        return (self.labels == POSITIVE).any(0) & (self.labels == NEGATIVE).any(0)


@dataclass(frozen=True)
class Recipe:
    loss: str = "asl"  # as published, with exponents 4 and 0 and margin 0.05; or "bce"
    lr: float = 1e-4
    steps: int = 5000
    patience: int = 300
    """Steps without a better validation precision after which a class stops."""
    every: int = 10
    """Steps between two looks at the validation samples (published: 1)."""


@dataclass(frozen=True)
class Refitted:
    weight: torch.Tensor  # [L, D]
    bias: torch.Tensor  # [L]
    before: np.ndarray  # float64 [L]: validation precision; NaN where there is none
    after: np.ndarray
    steps: np.ndarray  # int64 [L]: of the row that was kept; 0: the first one


def refit(weight: torch.Tensor, bias: torch.Tensor, train: Samples, val: Samples, recipe: Recipe) -> Refitted:
    able = torch.from_numpy(train.both() & val.both())
    known = torch.from_numpy(train.labels != UNKNOWN) & able
    is_positive = torch.from_numpy(train.labels == POSITIVE)
    rows, offsets = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    optimizer = torch.optim.Adam([rows, offsets], lr=recipe.lr)
    best_weight, best_bias, best = weight.clone(), bias.clone(), _precision(weight, bias, val)
    before, kept = best.copy(), np.zeros(len(bias), np.int64)
    entries = _entries(recipe.loss, len(bias))
    for step in range(1, recipe.steps + 1):
        optimizer.zero_grad()
        losses = entries(F.linear(train.inputs, rows, offsets), is_positive)
        torch.where(known, losses, 0.0).sum().backward()
        optimizer.step()
        if step % recipe.every == 0 or step == recipe.steps:
            found = _precision(rows.detach(), offsets.detach(), val)
            better = able.numpy() & (found > best)
            best, kept = np.where(better, found, best), np.where(better, step, kept)
            chosen = torch.from_numpy(better)
            best_weight[chosen], best_bias[chosen] = rows.detach()[chosen], offsets.detach()[chosen]
            if (step - kept[able.numpy()] >= recipe.patience).all():
                break
            # A class that has stopped must not come back with a later row.
            stopped = torch.from_numpy(step - kept >= recipe.patience)
            able, known = able & ~stopped, known & ~stopped
    return Refitted(best_weight, best_bias, before, best, kept)


def _entries(name: str, classes: int):
    """Losses [N, L] of logits [N, L] and positives."""
    if name == "bce":
        return lambda logits, is_positive: F.binary_cross_entropy_with_logits(
            logits, is_positive.to(logits.dtype), reduction="none")
    none = np.zeros(classes, np.int64)
    return Asl(AslSettings(name="asl"), Task(classes, 1, none, none, False)).entries


def _precision(weight: torch.Tensor, bias: torch.Tensor, val: Samples) -> np.ndarray:
    return average_precision(F.linear(val.inputs, weight, bias), val.labels, ungrouped=False).ap
