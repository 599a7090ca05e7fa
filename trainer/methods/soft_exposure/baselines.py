"""NE, wNE, FE and LS: baselines of Soft Exposure, which differ in what they do with unknown entries.

Reduction: sum over classes, mean over the global batch (wNE: each image's sum times g(ρ)/L).
Every loss is −ln σ(a/T) with a temperature T per entry: its sign is the label, its size the softness. What is computed
with is the sharpness s = 1/T: annotated entries have ±1, ignored ones 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Outputs, Settings, Step, positive, unknown
from lacuna.trainer.methods.known_gradient import WithGradient, cached_blocks, numbers

_PAPER = "Soft Exposure (anonymous NeurIPS submission)"


class ExposureSettings(Settings):
    positive_weight: float = Field(1.0, gt=0)
    """Weight of annotated positives."""


class NoExposure(Method[ExposureSettings]):
    """NE: annotated entries only."""

    paper = _PAPER

    ignores: ClassVar[bool] = True
    """False if no unknown entry has sharpness 0."""

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        logits = outputs.logits
        with torch.no_grad():
            fill = self.exposure(batch, step)
            per_sample, gradient = torch.empty_like(logits[:, 0]), torch.empty_like(logits)
            for rows in cached_blocks(logits):
                sharpness = gradient[rows]  # the block's own memory until it becomes the gradient
                fill(rows, sharpness)
                per_sample[rows] = self._rows_loss(logits[rows], batch.labels[rows], sharpness)
        return LossTerms(WithGradient.apply(logits, per_sample, gradient) * self.image_weights(batch, per_sample))

    def _rows_loss(self, logits: torch.Tensor, labels: torch.Tensor, sharpness: torch.Tensor) -> torch.Tensor:
        """Loss [rows]; turns the sharpness of unknown entries [rows, L] into the loss's gradient."""
        entries, positives = exposed_entries(logits, labels, sharpness, self.ignores)
        weight = self.settings.positive_weight
        if weight != 1:
            weights = 1 + (weight - 1) * positives
            entries.mul_(weights)
            sharpness.mul_(weights)
        return entries.sum(1)

    def exposure(self, batch: Batch, step: Step) -> Callable[[slice, torch.Tensor], None]:
        """A function (rows of the batch, out [rows, L]) that fills in the sharpness of unknown entries; what it writes
        to annotated ones is not used."""
        return lambda rows, out: out.fill_(self.constant)  # type: ignore[return-value]

    @property
    def constant(self) -> float:
        """Sharpness of all unknown entries."""
        return 0.0

    def image_weights(self, batch: Batch, losses: torch.Tensor) -> torch.Tensor | float:
        """[B], in the losses' dtype."""
        return 1.0


class FullExposureSettings(Settings):
    positive_weight: float = Field(5.0, gt=0)
    """Weight of annotated positives."""


class FullExposure(NoExposure):
    """FE: unknown entries are negatives."""

    settings_type = FullExposureSettings

    ignores = False

    @property
    def constant(self) -> float:
        return -1.0


class SofteningSettings(ExposureSettings):
    temperature: float = Field(gt=0)
    """|T| of every unknown entry; the paper does not say which it used, 2 to 20 are worth trying."""


class LabelSoftening(NoExposure):
    """LS: unknown entries are negatives, all equally soft."""

    settings_type = SofteningSettings
    settings: SofteningSettings

    ignores = False

    @property
    def constant(self) -> float:
        return -1 / self.settings.temperature


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
    settings: PartialBceSettings

    def image_weights(self, batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        classes = batch.labels.shape[1]
        # At least 1: ρ = 0 under a negative γ would be infinite.
        known = (~unknown(batch.labels)).sum(1).clamp(min=1).to(losses.dtype)
        return (settings.alpha * (known / classes) ** settings.gamma + settings.beta) / classes


def exposed_entries(logits: torch.Tensor, labels: torch.Tensor, sharpness: torch.Tensor,
                    ignores: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """−ln σ(s·a) and the 0/1 mask of positives, each [B, L]; `sharpness` of unknown entries becomes the gradient.

    Arithmetic with 0/1 masks, in place: on a CPU it takes a fifth of the time of `torch.where`.
    """
    positives, unknowns = numbers(positive(labels), logits), numbers(unknown(labels), logits)
    annotated = (2 * positives - 1).add_(unknowns)  # ±1, and 0 where unknown
    sharpness.mul_(unknowns).add_(annotated)
    wrong = torch.mul(logits, sharpness).neg_()
    entries = F.softplus(wrong)
    if ignores:
        entries.mul_(sharpness.abs().sign_())
    sharpness.mul_(wrong.sigmoid_()).neg_()
    return entries, positives
