"""MIME-style pseudo-labels: confident predictions become positives for good, after Liu et al. (ICML 2023).

Reduction: sum over classes / L, mean over the global batch. The loss is AN with −ln(p + 1e-5) on the current labels.
"""

from __future__ import annotations

import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field as StateField
from lacuna.trainer.methods.base import EpochStart, LossTerms, Method, Needs, Outputs, Settings, Step, positive, unknown
from lacuna.trainer.methods.cole import log_loss
from lacuna.trainer.methods.corrected import CORRECTED, corrected_field, with_corrected


class MimeSettings(Settings):
    threshold: float = Field(0.8, gt=0, lt=1)
    """θ: an unknown entry whose prediction is above it becomes positive, for good."""
    warmup_epochs: int = Field(5, ge=1)
    """Epochs of the phase before the first pseudo-labels (VOC 2, COCO and NUS 5, CUB 15)."""


class Mime(Method[MimeSettings]):
    """Permanent pseudo-positives from a pass over all samples before every epoch after the warm-up.

    An approximation: the paper's variational head (label embeddings by attention, sampled, with an information
    bottleneck term) is not here; the pseudo-labels work on the ordinary head, and the published numbers are of the
    whole method. A verified negative is never made positive.
    """

    paper = "Liu et al., Revisiting Pseudo-Label for Single-Positive Multi-Label Learning, ICML 2023"

    def fields(self) -> list[StateField]:
        return [corrected_field(self.task.classes)]

    def needs(self) -> Needs:
        return Needs(scored_pass=True)

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
        labels = with_corrected(batch.labels, step.state.read(CORRECTED))
        as_positive, as_negative = log_loss(outputs.logits)
        return LossTerms(torch.where(positive(labels), as_positive, as_negative).mean(1))
