"""CCD: training on debiased vision-language scores, Kim and Shim (CVPR 2025).

Reduction: mean over classes and the global batch; exact binary cross-entropy.
Class bias b_c: the mean of the highest score of an image, over the images whose highest class is c and whose scores
(normalised to sum 1) have an entropy ≤ 2. Targets: max(score, floor) / b_c, at most 1. From `late_epoch` on:
    if a table of crops is given, ratio·target + (1 − ratio)·max(best crop, floor) / b_c, at most 1
    + λ·(cross-entropy of the strong view to the first view's probabilities, which are constants)
    images of a higher entropy count min(1, unsure_weight) times in the first term
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import EpochStart, LossTerms, Needs, Outputs, Step, Task, negative, positive
from lacuna.trainer.methods.score_table import ScoreSettings, TableMethod
from lacuna.trainer.on_device.uploads import to_device


class CcdSettings(ScoreSettings):
    max_entropy: float = Field(2.0, gt=0)
    """Images whose scores have a higher entropy (natural logarithm) do not count for the class bias."""
    floor: float = Field(0.0, ge=0, lt=1)
    """Least score, before the bias is removed (published: 1/L)."""
    late_epoch: int = Field(2, ge=0)
    """First epoch of the phase (from 0) with crops and consistency."""
    crops: bool = False
    """Mix in the table `crop_max` (best score of an image's crops)."""
    ratio: float = Field(0.2, ge=0, le=1)
    """Weight of the image's own score against its crops' (authors, VOC: 0.2)."""
    consistency: float = Field(1.0, ge=0)
    """λ; 0 needs no second view, so that feature shards will do."""
    unsure_weight: float = Field(1.0, ge=0, le=1)
    """Weight of images with an entropy above max_entropy (authors, VOC: 1; the code's default: 0.1)."""


class Ccd(TableMethod[CcdSettings]):
    """Soft targets from debiased scores; known labels win over them (the paper has no labels at all).

    Not here: crops chosen by the classifier's own activation maps, which need the vision-language model while it
    trains; a table of crop scores takes their place. The map head's factor 3 is `model.boost=3`.
    """

    paper = "Kim and Shim, Classifier-Guided CLIP Distillation for Unsupervised Multi-Label Classification, CVPR 2025"
    class_state: ClassVar = {"bias": "float32 [L]"}
    bias: torch.Tensor | None = None

    def __init__(self, settings: CcdSettings, task: Task):
        super().__init__(settings, task)
        self.tables = ("scores", "crop_max") if settings.crops else ("scores",)

    def needs(self) -> Needs:
        return Needs(scores=self.tables, strong_view=self.settings.consistency > 0)

    def begin_epoch(self, start: EpochStart) -> None:
        if self.bias is not None:
            return
        keep = self.settings.max_entropy
        total, count = start.state.sum_rows(["scores"], (2, self.task.classes),
                                            lambda shard, rows, scores: top_sums(scores, keep))
        if (total < 0).any():
            raise UserError("method 'ccd' divides by mean scores, so they must not be negative: import probabilities.")
        # A class that is never on top has no bias to remove.
        self.bias = torch.where((count > 0) & (total > 0), total / count.clamp(min=1), 1.0).float()

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        late = step.epoch >= settings.late_epoch
        scores = step.state.read("scores").float()
        target = self._debiased(scores).clamp(max=1)
        if settings.crops and late:
            crops = self._debiased(step.state.read("crop_max").float())
            target = (settings.ratio * target + (1 - settings.ratio) * crops).clamp(max=1)
        target = torch.where(positive(batch.labels), 1.0, torch.where(negative(batch.labels), 0.0, target))
        loss = cross_entropy(outputs.logits, target)
        if late and settings.unsure_weight < 1:
            loss = torch.where(entropy(scores) > settings.max_entropy, settings.unsure_weight * loss, loss)
        if late and settings.consistency:
            strong = step.forward(batch.strong_view).logits
            loss = loss + settings.consistency * cross_entropy(strong, torch.sigmoid(outputs.logits.detach()))
        return LossTerms(loss)

    def _debiased(self, scores: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        self.bias = to_device(self.bias, scores.device)  # it stays there
        return scores.clamp(min=self.settings.floor) / self.bias

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.bias is None else {"bias": self.bias}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.bias = state.get("bias")


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[B], mean over classes."""
    return F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none").mean(1)


def entropy(scores: torch.Tensor) -> torch.Tensor:
    """[n] of rows [n, L], normalised to sum 1, by the natural logarithm."""
    shares = scores.double().clamp(min=0)
    shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-30)
    return -torch.xlogy(shares, shares).sum(1)


def top_sums(scores: np.ndarray, max_entropy: float) -> np.ndarray:
    """float64 [2, L]: sum and number of top scores by class, over rows [n, L] of low entropy."""
    values = np.asarray(scores, np.float64)
    top = values.argmax(1)
    kept = (entropy(torch.from_numpy(values)).numpy() <= max_entropy) & (values.max(1) > 0)
    found = np.zeros((2, values.shape[1]))
    np.add.at(found[0], top[kept], values[kept, top[kept]])
    np.add.at(found[1], top[kept], 1)
    return found
