"""ASL: the asymmetric loss of Ridnik et al. (ICCV 2021); unknown counts as negative.

Reduction: **sum** over classes and the global batch, as published. The loop takes a mean over samples, so each
sample's sum is multiplied by the number of samples; learning rates of 1e-4 with Adam are tuned for that.
Log terms are ln max(p, 1e-8).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Outputs, Settings, Step, positive

_FLOOR = 1e-8


class AslSettings(Settings):
    gamma_positive: float = Field(0.0, ge=0)
    """Focal exponent of positives (the authors' COCO training; the default of their loss class is 1)."""
    gamma_negative: float = Field(4.0, ge=0)
    """Focal exponent of everything else."""
    clip: float = Field(0.05, ge=0, lt=1)
    """Probability margin: negatives with p below it have no loss."""
    focal_gradient: bool = False
    """Differentiate the focal weight too (the authors train without)."""


class Asl(Method[AslSettings]):
    """Focal losses with exponents of their own for positives and the rest, and a margin that frees the rest."""

    paper = "Ridnik et al., Asymmetric Loss for Multi-Label Classification, ICCV 2021"

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        return LossTerms(self.entries(outputs.logits, positive(batch.labels)).sum(1) * step.samples)

    def entries(self, logits: torch.Tensor, is_positive: torch.Tensor) -> torch.Tensor:
        """[B, L], where everything that is not positive is negative."""
        settings = self.settings
        # What the focal weight is a power of: 1 − the probability of the label, taken from σ(−a) to keep its digits.
        miss = torch.where(is_positive, torch.sigmoid(-logits), F.relu(torch.sigmoid(logits) - settings.clip))
        if not settings.focal_gradient:
            miss = miss.detach()
        weight = torch.where(is_positive, safe_power(miss, settings.gamma_positive),
                             safe_power(miss, settings.gamma_negative))
        entries = torch.where(is_positive, log_positive(logits), log_negative(logits, settings.clip))
        return -(weight * entries)


def log_positive(logits: torch.Tensor) -> torch.Tensor:
    """ln max(p, 1e-8); below the floor the gradient is 0, as with the authors' clamp."""
    return F.logsigmoid(logits).clamp(min=torch.tensor(_FLOOR).log().item())


def log_negative(logits: torch.Tensor, clip: float) -> torch.Tensor:
    """ln max(min(1 − p + clip, 1), 1e-8)."""
    if not clip:
        return log_positive(-logits)
    return torch.log1p(-F.relu(torch.sigmoid(logits) - clip).clamp(max=1 - _FLOOR))


def safe_power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """base ** exponent with a finite gradient at base = 0 for exponents below 1, where it would be infinite · 0."""
    if exponent == 0:
        return torch.ones_like(base)
    if 0 < exponent < 1:
        base = base.clamp(min=torch.finfo(base.dtype).tiny)
    return base**exponent
