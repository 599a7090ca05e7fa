"""CCD-style training on debiased vision-language scores, after Kim and Shim (CVPR 2025).

Reduction: mean over classes and the global batch; exact binary cross-entropy to soft targets.
Class bias b_c: the mean of the highest score of an image, over the images whose highest class is c and whose scores
(normalised to sum 1) have an entropy ≤ 2. Targets: score / b_c, at least `floor`, within [0, 1]; from `crop_epoch` on,
if a table of crops is given, ratio·target + (1 − ratio)·(best crop / b_c, likewise).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from data_pipelines.errors import UserError
from data_pipelines.stream import Batch
from state_store.passes import map_shards
from trainer.methods.base import EpochStart, LossTerms, Outputs, Step, negative, positive
from trainer.methods.score_table import ScoreSettings, TableMethod


class CcdSettings(ScoreSettings):
    max_entropy: float = Field(2.0, gt=0)
    """Images whose scores have a higher entropy (natural logarithm) do not count for the class bias."""
    floor: float = Field(0.0, ge=0, lt=1)
    """Least target; the authors smooth labels so, with a value that we do not know."""
    crops: bool = False
    """Mix in the table `crop_max` (best score of an image's crops) from `crop_epoch` on."""
    crop_epoch: int = Field(2, ge=0)
    """First epoch of the phase (from 0) with the crops' scores."""
    ratio: float = Field(0.5, ge=0, le=1)
    """Weight of the image's own score against its crops'; the authors' value is not known to us."""


class Ccd(TableMethod):
    """Soft targets from debiased scores; known labels win over them (the paper has no labels at all).

    Not here: crops chosen by the classifier's own activation maps while it trains (they need the vision-language model
    at hand; a table of crop scores takes their place), the consistency term and the flag of high-entropy images, whose
    use is not stated well enough. The map head's factor 3 is `model.boost=3`.
    """

    paper = "Kim and Shim, Classifier-Guided CLIP Distillation for Unsupervised Multi-Label Classification, CVPR 2025"
    settings_type = CcdSettings
    class_state: ClassVar = {"bias": "float32 [L]"}
    bias: torch.Tensor | None = None

    @property
    def needs_scores(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("scores", "crop_max") if self.settings.crops else ("scores",)  # type: ignore[attr-defined]

    def begin_epoch(self, start: EpochStart) -> None:
        if self.bias is not None:
            return
        assert start.state is not None
        session, world, keep = start.state.session, start.world, self.settings.max_entropy  # type: ignore[attr-defined]
        sums = np.zeros((2, self.task.classes))
        mine = range(world.rank, session.schema.shards, world.size)
        for part in map_shards(session, ["scores"], lambda _, rows: top_sums(rows["scores"], keep), mine):
            sums += part
        total, count = world.global_sum(torch.from_numpy(sums).to(world.device)).cpu()
        if (total < 0).any():
            raise UserError("method 'ccd' divides by mean scores, so they must not be negative: import probabilities.")
        # A class that is never on top has no bias to remove.
        self.bias = torch.where((count > 0) & (total > 0), total / count.clamp(min=1), 1.0).float()

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings: CcdSettings = self.settings  # type: ignore[assignment]
        assert step.state is not None
        target = self._debiased(step.state.read("scores").float())
        if settings.crops and step.epoch >= settings.crop_epoch:
            crops = self._debiased(step.state.read("crop_max").float())
            target = settings.ratio * target + (1 - settings.ratio) * crops
        target = torch.where(positive(batch.labels), 1.0, torch.where(negative(batch.labels), 0.0, target))
        entries = F.binary_cross_entropy_with_logits(outputs.logits, target.to(outputs.logits.dtype), reduction="none")
        return LossTerms(entries.mean(1))

    def _debiased(self, scores: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        floor = self.settings.floor  # type: ignore[attr-defined]
        return (scores / self.bias.to(scores.device)).clamp(min=floor, max=1)

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.bias is None else {"bias": self.bias}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.bias = state.get("bias")


def top_sums(scores: np.ndarray, max_entropy: float) -> np.ndarray:
    """float64 [2, L]: sum and number of top scores by class, over rows [n, L] of low entropy."""
    values = np.asarray(scores, np.float64)
    shares = np.clip(values, 0, None)
    shares /= np.maximum(shares.sum(1, keepdims=True), 1e-30)
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(1)
    top = values.argmax(1)
    kept = (entropy <= max_entropy) & (values.max(1) > 0)
    found = np.zeros((2, values.shape[1]))
    np.add.at(found[0], top[kept], values[kept, top[kept]])
    np.add.at(found[1], top[kept], 1)
    return found
