"""EM: entropy maximisation on unknown entries, Zhou et al. (ECCV 2022).

Reduction: sum over classes / L, mean over the global batch. Log terms are −ln(p + 1e-5), as in Cole et al.
"""

from __future__ import annotations

import torch
from pydantic import Field

from data_pipelines.stream import Batch
from trainer.methods.base import LossTerms, Method, Outputs, Settings, Step, negative, positive
from trainer.methods.cole import log_loss

PAPER = "Zhou et al., Acknowledging the Unknown for Multi-Label Learning with Single Positive Labels, ECCV 2022"


class EntropySettings(Settings):
    entropy_weight: float = Field(0.1, ge=0)
    """α: COCO and NUS 0.1, VOC 0.2, CUB 0.01."""


class EntropyMaximization(Method):
    """Positives as usual, unknown entries pushed towards p = ½. A verified negative (the paper has none) is −ln(1 − p).

    For thresholded metrics use 0.75: unknown entries settle near 0.5.
    """

    paper = PAPER
    settings_type = EntropySettings

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings: EntropySettings = self.settings  # type: ignore[assignment]
        return LossTerms(entropy_entries(outputs.logits, batch.labels, settings.entropy_weight).mean(1))


def entropy_entries(logits: torch.Tensor, labels: torch.Tensor, weight: float) -> torch.Tensor:
    """EM's loss [B, L] entry by entry."""
    as_positive, as_negative = log_loss(logits)
    entropy = torch.sigmoid(logits) * as_positive + torch.sigmoid(-logits) * as_negative
    known = torch.where(positive(labels), as_positive, as_negative)
    return torch.where(positive(labels) | negative(labels), known, -weight * entropy)
