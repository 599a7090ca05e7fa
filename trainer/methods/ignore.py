"""IGNORE: false negatives told by how much hiding everything but the annotated object changes a class's logit,
Song et al. (ECCV 2024).

Three forwards a step: the image, a strong view of it, and the image masked by the annotated class's score map (kept
where the map, normalised per image and enlarged, is above 0.8). With logits a, a_s and a_m, gap = |a − a_m|:
    G ← 0.999·G + 0.001·mean gap of annotated positives, A ← 0.999·A + 0.001·mean of a over the batch, both before use
    rejected: unknown entries with gap > G and a > A, from the 4th epoch on
    loss = w_s·mean over annotated positives of nl(p) + mean over entries not rejected of AN(p_s) + ½·mean (a_s − a)²
nl(p) = −ln(p + 1e-5); gradients flow through both sides of the square; all means are over the global batch.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Needs, Outputs, Settings, Step, Task, positive, unknown
from lacuna.trainer.methods.cole import log_loss
from lacuna.trainer.on_device.uploads import to_device


class IgnoreSettings(Settings):
    positive_weight: float = Field(0.1, ge=0)
    """w_s of the first view's annotated positives (published: 0.1 with a ResNet)."""
    consistency: float = Field(0.5, ge=0)
    """Weight of the squared difference of the views' logits."""
    keep: float = Field(0.8, ge=0, lt=1)
    """A pixel is kept where the annotated class's normalised map is above this."""
    momentum: float = Field(0.999, ge=0, lt=1)
    """Of the two running means."""
    first_epoch: int = Field(3, ge=0)
    """Epochs of the phase before the first rejection."""


class Ignore(Method[IgnoreSettings]):
    """Repaired where the released code goes wrong: maps are normalised per image to (map − min)/(max − min) (released:
    over the batch, divided by the maximum), and a batch without positives is a batch like any other.

    Several annotated positives: the highest of their maps, cell by cell; none: nothing is hidden, so nothing is
    rejected. Hidden pixels are those that normalisation maps to 0. A verified negative is never rejected.
    """

    paper = ("Song et al., IGNORE: Information Gap-Based False Negative Loss Rejection for Single Positive Multi-Label "
             "Learning, ECCV 2024")
    class_state: ClassVar = {"gap": "float32 [1]", "logits": "float32 [L]"}

    def __init__(self, settings: IgnoreSettings, task: Task):
        super().__init__(settings, task)
        self.gap, self.logits = torch.zeros(1), torch.zeros(task.classes)

    def needs(self) -> Needs:
        return Needs(maps=True, strong_view=True, pixels=True, whole_batch=True)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        is_positive, logits = positive(batch.labels), outputs.logits
        with torch.no_grad():
            shown = kept_pixels(outputs.maps, is_positive, batch.inputs.shape[-1], settings.keep)
            blank = to_device(np.array(self.task.blank, np.uint8), shown.device).view(3, 1, 1)
            hidden = torch.where(shown, to_device(batch.inputs, shown.device), blank)
            gap = (logits - step.forward(hidden).logits).abs()
        strong = step.forward(batch.strong_view).logits
        annotated = self._average(gap, logits.detach(), is_positive, step)
        rejected = torch.zeros_like(is_positive)
        if step.epoch >= settings.first_epoch:
            rejected = unknown(batch.labels) & (gap > self.gap) & (logits > self.logits)
        kept = step.world.global_sum((~rejected).sum())
        as_positive, as_negative = log_loss(strong)
        assumed = torch.where(is_positive, as_positive, as_negative)
        own = torch.where(is_positive, log_loss(logits)[0], 0.0).sum(1) / annotated.clamp(min=1)
        # Each is a mean over entries of the global batch; the loop divides by its samples.
        terms = (settings.positive_weight * own + torch.where(rejected, 0.0, assumed).sum(1) / kept.clamp(min=1)
                 + settings.consistency * (strong - logits).square().mean(1) / step.samples)
        return LossTerms(terms * step.samples)

    def _average(self, gap: torch.Tensor, logits: torch.Tensor, is_positive: torch.Tensor, step: Step) -> torch.Tensor:
        """Move both running means; the number of annotated positives of the global batch."""
        mu = self.settings.momentum
        at_positives = torch.stack([torch.where(is_positive, gap, 0.0).sum(), is_positive.sum().to(gap.dtype)])
        sums = step.world.global_sum(torch.cat([logits.sum(0), at_positives]))
        self.gap, self.logits = (to_device(kept, gap.device) for kept in (self.gap, self.logits))  # they stay there
        moved = mu * self.gap + (1 - mu) * (sums[-2] / sums[-1]).float()
        self.gap = torch.where(sums[-1] > 0, moved, self.gap)
        self.logits = mu * self.logits + (1 - mu) * (sums[:-2] / step.samples).float()
        return sums[-1]

    def state(self) -> dict[str, torch.Tensor]:
        return {"gap": self.gap, "logits": self.logits}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.gap, self.logits = state["gap"], state["logits"]


def kept_pixels(maps: torch.Tensor, is_positive: torch.Tensor, side: int, keep: float) -> torch.Tensor:
    """bool [B, 1, side, side]: where the annotated class is seen; everywhere for an image without one."""
    cam = torch.where(is_positive[:, :, None, None], maps, -torch.inf).amax(1, keepdim=True)
    annotated = is_positive.any(1)[:, None, None, None]
    cam = torch.where(annotated, cam, 0.0)
    low, high = cam.amin((2, 3), keepdim=True), cam.amax((2, 3), keepdim=True)
    cam = (cam - low) / (high - low).clamp(min=torch.finfo(cam.dtype).tiny)
    if len(cam) == 0:  # nothing to enlarge
        return torch.zeros((0, 1, side, side), dtype=torch.bool, device=maps.device)
    enlarged = F.interpolate(cam, size=(side, side), mode="bilinear", align_corners=False)
    return (enlarged > keep) | ~annotated
