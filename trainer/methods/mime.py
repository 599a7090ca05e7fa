"""MIME: pseudo-labels from a variational model of every class, Liu et al. (ICML 2023).

Reduction: sum over classes / L, mean over the global batch. The loss is AN with −ln(p + 1e-5) on the current labels.
With model.head=variational (decoders/variational.py) p is σ of a drawn logit, and the bottleneck's information counts:
    logit = w·z + b, z the mean of `draws` draws of N(μ, σ²): a Gaussian number, mean w·μ + b, spread ‖w·σ‖/√draws
    + β · mean over classes of the information
Legend: B batch, L classes.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field as StateField
from lacuna.state_store.row_hash import row_keys, tag_key
from lacuna.trainer.methods.base import EpochStart, LossTerms, Method, Needs, Outputs, Settings, Step, positive, unknown
from lacuna.trainer.methods.cole import log_loss
from lacuna.trainer.methods.corrected import CORRECTED, corrected_field, with_corrected
from lacuna.trainer.on_device.hashing import normal, upper


class MimeSettings(Settings):
    threshold: float = Field(0.95, gt=0, lt=1)
    """θ: an unknown entry whose prediction is above it becomes positive, for good."""
    warmup_epochs: int = Field(2, ge=1)
    """Epochs of the phase before the first pseudo-labels (VOC, COCO and NUS 2, CUB 5)."""
    information: float = Field(1e-4, ge=0)
    """β of the bottleneck (model.head=variational)."""
    draws: int = Field(10, ge=1)
    """Draws of z whose mean makes a logit (model.head=variational)."""


class Mime(Method[MimeSettings]):
    """Permanent pseudo-positives from a pass over all samples before every epoch after the warm-up.

    With model.head=variational as its released code states it. Differences: passes and evaluation take w·μ + b, the
    mean of what is drawn there; a logit is drawn as one number instead of through z, which has the same distribution
    and the same mean gradient, with less noise. Draws belong to the sample and the epoch, not to a rank. With any other
    head there is no bottleneck and nothing is drawn. A verified negative is never made positive.
    """

    paper = "Liu et al., Revisiting Pseudo-Label for Single-Positive Multi-Label Learning, ICML 2023"

    def fields(self) -> list[StateField]:
        return [corrected_field(self.task.classes)]

    def needs(self) -> Needs:
        return Needs(scored_pass=True, class_features=self.task.draws)

    def begin_epoch(self, start: EpochStart) -> None:
        settings = self.settings
        if start.epoch < settings.warmup_epochs:
            return
        for scored in start.scored():
            before = scored.state.read(CORRECTED)
            sure = unknown(scored.batch.labels) & (torch.sigmoid(scored.outputs.logits) > settings.threshold)
            if bool((sure & ~before).any()):  # a shard without news is not written again
                scored.state.write({CORRECTED: before | sure})

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings, logits = self.settings, outputs.logits
        labels = with_corrected(batch.labels, step.state.read(CORRECTED))
        if not self.task.draws:
            return LossTerms(_entries(logits, labels).mean(1))
        spread, information = outputs.features.unbind(2)
        drawn = logits + spread * self._noise(batch, step, logits) / math.sqrt(settings.draws)
        return LossTerms((_entries(drawn, labels) + settings.information * information).mean(1))

    def _noise(self, batch: Batch, step: Step, like: torch.Tensor) -> torch.Tensor:
        """[B, L] of N(0, 1)."""
        keys = row_keys(tag_key(self.task.seed, f"mime {step.phase}", step.epoch), batch.shards, batch.rows)
        return normal(upper(keys, like.device), self.task.classes).to(like.dtype)


def _entries(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    as_positive, as_negative = log_loss(logits)
    return torch.where(positive(labels), as_positive, as_negative)
