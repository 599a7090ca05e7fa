"""NE, wNE, FE and LS: baselines of Soft Exposure, which differ in what they do with unknown entries.

Reduction: sum over classes, mean over the global batch (wNE: each image's sum times g(ρ)/L).
Every loss is −ln σ(a/T) with a temperature T per entry: its sign is the label, its size the softness, 0 = ignored.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from data_pipelines.stream import Batch
from trainer.methods.base import LossTerms, Method, Outputs, Settings, Step, positive, unknown

_PAPER = "Soft Exposure (anonymous NeurIPS submission)"


class ExposureSettings(Settings):
    positive_weight: float = Field(1.0, gt=0)
    """Weight of annotated positives."""


class NoExposure(Method):
    """NE: annotated entries only."""

    paper = _PAPER
    settings_type: ClassVar[type[Settings]] = ExposureSettings

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        temperatures = self.unknown_temperatures(batch, step)
        entries = exposed_entries(outputs.logits, batch.labels, temperatures)
        weight = self.settings.positive_weight  # type: ignore[attr-defined]
        if weight != 1:
            entries = torch.where(positive(batch.labels), weight * entries, entries)
        return LossTerms(entries.sum(1) * self.image_weights(batch, entries))

    def unknown_temperatures(self, batch: Batch, step: Step) -> torch.Tensor | float:
        """T of the unknown entries: a number, or [B, L]."""
        return 0.0

    def image_weights(self, batch: Batch, entries: torch.Tensor) -> torch.Tensor | float:
        """[B], in the entries' dtype."""
        return 1.0


class FullExposureSettings(Settings):
    positive_weight: float = Field(5.0, gt=0)
    """Weight of annotated positives."""


class FullExposure(NoExposure):
    """FE: unknown entries are negatives."""

    settings_type = FullExposureSettings

    def unknown_temperatures(self, batch: Batch, step: Step) -> float:
        return -1.0


class SofteningSettings(ExposureSettings):
    temperature: float = Field(gt=0)
    """|T| of every unknown entry; the paper does not say which it used, 2 to 20 are worth trying."""


class LabelSoftening(NoExposure):
    """LS: unknown entries are negatives, all equally soft."""

    settings_type = SofteningSettings

    def unknown_temperatures(self, batch: Batch, step: Step) -> float:
        return -self.settings.temperature  # type: ignore[attr-defined]


class PartialBceSettings(ExposureSettings):
    alpha: float = -4.45
    """α of g(ρ) = α·ρ^γ + β, ρ = the annotated share of an image's labels."""
    beta: float = 5.45
    """β of g: images with few annotations weigh up to 5.45, fully annotated ones 1."""
    gamma: float = 1.0
    """γ of g. With α = 1, β = 0, γ = −1 an image's loss is divided by its number of annotations."""


class WeightedNoExposure(NoExposure):
    """wNE: annotated entries only, weighted by g(ρ)/L; an image without annotations has no loss."""

    paper = "Durand et al., Learning a Deep ConvNet for Multi-Label Classification with Partial Labels, CVPR 2019"
    settings_type = PartialBceSettings

    def image_weights(self, batch: Batch, entries: torch.Tensor) -> torch.Tensor:
        settings: PartialBceSettings = self.settings  # type: ignore[assignment]
        classes = batch.labels.shape[1]
        # At least 1: ρ = 0 under a negative γ would be infinite.
        known = (~unknown(batch.labels)).sum(1).clamp(min=1).to(entries.dtype)
        return (settings.alpha * (known / classes) ** settings.gamma + settings.beta) / classes


def exposed_entries(logits: torch.Tensor, labels: torch.Tensor,
                    unknown_temperatures: torch.Tensor | float) -> torch.Tensor:
    """−ln σ(a/T) [B, L]; annotated entries have T = ±1, unknown ones the given T, 0 = ignored."""
    known = torch.where(positive(labels), 1.0, -1.0).to(logits.dtype)
    t = torch.where(unknown(labels), unknown_temperatures, known)
    # Divided by 1 where it is ignored: 0 · inf in the gradient would be NaN.
    return torch.where(t == 0, 0.0, F.softplus(-logits / torch.where(t == 0, 1.0, t)))
