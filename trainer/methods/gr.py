"""GR: generalised robust loss of Chen et al. (IJCAI 2024), and the pseudo-label term that GPR adds to it (ICCV 2025).

Reduction: mean over classes and the global batch. Positives: −ln(p + 1e-7). Unknown entries:
V·{K·(1 − p^q2)/q2 + (1 − K)·(1 − (1 − p)^q3)/q3}, with K = σ(w·p + b) the belief that the entry is a missed positive
and V = exp(−½((p − μ)/s)²) its weight, both without gradient; w, b, μ and s move linearly over the phase's epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Needs, Outputs, Settings, Step, negative, positive

_EPSILON = 1e-7


class GrSettings(Settings):
    slope: tuple[float, float] = (0.0, 2.0)
    """w at the phase's start and end (VOC; COCO, NUS and CUB end at 10)."""
    offset: tuple[float, float] = (-2.0, -2.0)
    """b at the phase's start and end (VOC; COCO, NUS and CUB end at −8)."""
    center: tuple[float, float] = (0.5, 0.8)
    """μ at the phase's start and end."""
    width: tuple[float, float] = (2.0, 0.5)
    """s at the phase's start and end, above 0."""
    q_positive: float = Field(0.01, gt=0)
    """q2, of the part that treats an entry as positive; towards 0 it becomes −ln p."""
    q_negative: float = Field(1.0, gt=0)
    """q3, of the part that treats it as negative; 1 is the absolute error (CUB 1.5)."""
    linear_epochs: int = Field(0, ge=0)
    """Epochs at the phase's start in which the schedules stand still."""


@dataclass(frozen=True)
class Schedule:
    """The four moving numbers in one epoch."""

    slope: float
    offset: float
    center: float
    width: float

    @classmethod
    def at(cls, settings: GrSettings, epoch: int, epochs: int) -> Schedule:
        """`epoch` from 0. K's line starts one epoch later than V's, and ends that much short of its end."""
        rest = max(1, epochs - settings.linear_epochs)
        late, early = (max(0, epoch + shift - settings.linear_epochs) / rest for shift in (0, 1))
        between = lambda ends, share: ends[0] + (ends[1] - ends[0]) * share  # noqa: E731
        return cls(between(settings.slope, late), between(settings.offset, late),
                   between(settings.center, early), between(settings.width, early))

    def belief(self, p: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.slope * p + self.offset)

    def weight(self, p: torch.Tensor) -> torch.Tensor:
        return torch.exp(-0.5 * ((p - self.center) / self.width) ** 2)


class GeneralizedRobust(Method[GrSettings]):
    """GR. A verified negative (the paper has none) is −ln(1 − p + 1e-7)."""

    paper = "Chen et al., Boosting Single Positive Multi-Label Classification with Generalized Robust Loss, IJCAI 2024"

    def needs(self) -> Needs:
        return Needs(epochs=True)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        schedule = Schedule.at(settings, step.epoch, step.epochs)
        unknown = robust_entries(outputs.logits, schedule, settings.q_positive, settings.q_negative)
        return LossTerms(known_or(outputs.logits, batch.labels, unknown).mean(1))


def log_loss(logits: torch.Tensor) -> torch.Tensor:
    """−ln(p + 1e-7)."""
    return -torch.log(torch.sigmoid(logits) + _EPSILON)


def known_or(logits: torch.Tensor, labels: torch.Tensor, of_unknown: torch.Tensor) -> torch.Tensor:
    """[B, L]: log losses where the label is known, the given entries where it is not."""
    entries = torch.where(positive(labels), log_loss(logits), of_unknown)
    return torch.where(negative(labels), log_loss(-logits), entries)


def robust_entries(logits: torch.Tensor, schedule: Schedule, q_positive: float, q_negative: float) -> torch.Tensor:
    """GR's loss of unknown entries [B, L]; powers come from logsigmoid, so gradients are finite if p underflows."""
    p = torch.sigmoid(logits.detach())
    belief = schedule.belief(p)
    as_positive = -torch.expm1(q_positive * F.logsigmoid(logits)) / q_positive
    as_negative = -torch.expm1(q_negative * F.logsigmoid(-logits)) / q_negative
    return schedule.weight(p) * (belief * as_positive + (1 - belief) * as_negative)


def pseudo_positive_entries(logits: torch.Tensor, schedule: Schedule, most: float, least: float,
                            target: float = 0.9) -> torch.Tensor:
    """GPR's loss of entries [B, L] that somebody called positive: u·[ρ·(−ln p) + (1 − ρ)·(−ln(1 − p))].

    u = 1 − V, kept within [least, most] (λ2, λ1): the less GR trusts an entry, the more the pseudo-label counts.
    """
    doubt = 1 - schedule.weight(torch.sigmoid(logits.detach())).clamp(1 - most, 1 - least)
    return doubt * (target * log_loss(logits) + (1 - target) * log_loss(-logits))
