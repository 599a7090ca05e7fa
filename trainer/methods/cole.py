"""Stateless losses of Cole et al. (CVPR 2021): BCE, BCE-LS, IU, IUN, AN, AN-LS, WAN, EPR, PR.

Reduction: sum over classes / L, mean over the global batch; EPR's regulariser is added undivided.
Log terms are −ln(p + 1e-5), which bounds an entry's loss at 11.5, as in the authors' code.
"""

from __future__ import annotations

import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import (
    LossTerms,
    Method,
    Needs,
    Outputs,
    Settings,
    Step,
    Task,
    expected_positives,
    negative,
    positive,
)
from lacuna.trainer.on_device.uploads import to_device

_EPSILON = 1e-5
_PAPER = "Cole et al., Multi-Label Learning from Single Positive Labels, CVPR 2021"


def log_loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(−ln(p + 1e-5), −ln(1 − p + 1e-5)) of float32 logits; 1 − p is taken as σ(−a), which keeps its digits."""
    return -torch.log(torch.sigmoid(logits) + _EPSILON), -torch.log(torch.sigmoid(-logits) + _EPSILON)


class Bce(Method):
    """Full labels: every class is known."""

    paper = _PAPER
    smoothing = 0.0

    def needs(self) -> Needs:
        return Needs(full_labels=True)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        # A product with ±1 instead of a choice of either: its gradient is one product, not two choices and a sum.
        towards = outputs.logits * torch.where(positive(batch.labels), 1.0, -1.0)
        if not self.smoothing:  # half the work of both sides
            return LossTerms(-torch.log(torch.sigmoid(towards) + _EPSILON).mean(1))
        right, wrong = log_loss(towards)
        return LossTerms(((1 - self.smoothing) * right + self.smoothing * wrong).mean(1))


class SmoothingSettings(Settings):
    smoothing: float = Field(0.1, ge=0, le=0.5)
    """Target of a negative, and 1 − target of a positive (the authors' code; the paper's text halves it)."""


class BceSmoothed(Bce):
    settings_type = SmoothingSettings

    def __init__(self, settings, task):
        super().__init__(settings, task)
        self.smoothing = settings.smoothing


class AssumeNegative(Bce):
    """AN: unknown counts as negative."""


    def needs(self) -> Needs:
        return Needs()


class AssumeNegativeSmoothed(BceSmoothed):
    """AN-LS: AN with smoothed targets."""


    def needs(self) -> Needs:
        return Needs()


class WeakAssumeNegative(Method):
    """WAN: everything that is not positive is a negative of weight 1/(L − 1)."""

    paper = _PAPER

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        return LossTerms(weak_negatives(outputs.logits, batch.labels))


def weak_negatives(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """WAN's loss [B]."""
    as_positive, as_negative = log_loss(logits)
    weak = 1 / max(1, logits.shape[1] - 1)
    return torch.where(positive(labels), as_positive, weak * as_negative).mean(1)


class IgnoreUnknown(Method):
    """IU and IUN: known entries only. They differ in what is annotated: one negative, or every true negative."""

    paper = _PAPER

    def needs(self) -> Needs:
        return Needs(negatives=True)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        as_positive, as_negative = log_loss(outputs.logits)
        entries = torch.where(positive(batch.labels), as_positive, 0.0)
        return LossTerms(torch.where(negative(batch.labels), as_negative, entries).mean(1))


class IgnoreUnknownAllNegatives(IgnoreUnknown):
    """IUN: as IU, with every true negative annotated."""



class PairwiseRanking(Method):
    """PR: every annotated positive should stand a margin of 1 above every other class, in probability."""

    paper = _PAPER

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        p = torch.sigmoid(outputs.logits)
        row, cls = (to_device(part, p.device) for part in positive(batch.host_labels).nonzero(as_tuple=True))
        margins = torch.relu(1 - p[row, cls][:, None] + p[row])  # [positives, L]
        margins = torch.where(positive(batch.labels)[row], 0.0, margins)
        per_sample = torch.zeros_like(p[:, 0]).index_add(0, row, margins.sum(1))
        return LossTerms(per_sample / p.shape[1])


class ExpectedPositives(Method[Settings]):
    """EPR: positives only, plus a pull of the predicted number of positives towards k over the *global* batch."""

    paper = _PAPER

    def __init__(self, settings: Settings, task: Task):
        super().__init__(settings, task)
        self.k = expected_positives(task)

    def needs(self) -> Needs:
        return Needs(whole_batch=True)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        as_positive, _ = log_loss(outputs.logits)
        return LossTerms(torch.where(positive(batch.labels), as_positive, 0.0).mean(1),
                         expected_positives_penalty(torch.sigmoid(outputs.logits), self.k, step))


def expected_positives_penalty(p: torch.Tensor, k: float, step: Step) -> torch.Tensor:
    """((mean number of predicted positives − k) / L)², the mean taken over the global batch."""
    predicted = step.world.global_sum(p.sum()) / step.samples
    return ((predicted - k) / p.shape[1]) ** 2
