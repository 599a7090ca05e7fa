"""Hill and SPLC: Zhang et al. (2021); unknown counts as negative.

Reduction: **sum** over classes and the global batch, as published. The loop takes a mean over samples, so each
sample's sum is multiplied by the number of samples; learning rates of 1e-4 with Adam are tuned for that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Outputs, Settings, Step, positive, unknown

_PAPER = "Zhang et al., Simple and Robust Loss Design for Multi-Label Learning with Missing Labels, 2021"


class FocalMarginSettings(Settings):
    margin: float = Field(1.0, ge=0)
    """Subtracted from a positive's logit."""
    gamma: float = Field(2.0, ge=1)
    """Focal exponent; the focal weight is differentiated."""


class HillSettings(FocalMarginSettings):
    hill: float = Field(1.5, ge=1)
    """λ of the negatives' loss (λ − p)·p²: at 1.5 its gradient vanishes again as p → 1."""


class Hill(Method[HillSettings]):
    """Focal margin loss on positives; on the rest a loss that forgives confident predictions."""

    paper = _PAPER

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        p = torch.sigmoid(outputs.logits)
        entries = torch.where(positive(batch.labels), focal(outputs.logits - settings.margin, settings.gamma),
                              (settings.hill - p) * p**2)
        return LossTerms(entries.sum(1) * step.samples)


class SplcSettings(FocalMarginSettings):
    threshold: float = Field(0.6, gt=0, lt=1)
    """τ: an unknown entry with p above it is treated as positive (0.65 for COCO with 75 % of the labels left)."""
    first_epoch: int = Field(1, ge=0)
    """Epochs of the phase before the first correction."""


class Splc(Method[SplcSettings]):
    """Focal margin loss in which confident unknown entries count as positives of this batch; nothing is stored.

    A corrected entry has no margin. A verified negative is never corrected; the published data have none.
    """

    paper = _PAPER

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        return LossTerms(self.entries(outputs.logits, batch.labels, step.epoch).sum(1) * step.samples)

    def entries(self, logits: torch.Tensor, labels: torch.Tensor, epoch: int) -> torch.Tensor:
        """Losses [B, L]."""
        settings = self.settings
        is_positive = positive(labels)
        logits = torch.where(is_positive, logits - settings.margin, logits)
        if epoch >= settings.first_epoch:
            is_positive = is_positive | (unknown(labels) & (torch.sigmoid(logits) > settings.threshold))
        return focal(torch.where(is_positive, logits, -logits), settings.gamma)


def focal(logits: torch.Tensor, gamma: float) -> torch.Tensor:
    """−(1 − p)^γ ln p of a target's logits, from logsigmoid: the authors' ln σ is −inf for very negative ones."""
    return -(torch.sigmoid(-logits) ** gamma) * F.logsigmoid(logits)
