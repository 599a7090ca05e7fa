"""VLPL: pseudo-positives of a vision-language model on top of EM, Xing et al. (CVPRW 2024).

Reduction: sum over classes / L, mean over the global batch; nl(p) = −ln(p + 1e-5). Positives nl(p); pseudo-positives
w·[(1 − e)·nl(p) + e·nl(1 − p)]; other unknown entries −α·[p·nl(p) + (1 − p)·nl(1 − p)], as in EM.
"""

from __future__ import annotations

import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Outputs, Step
from lacuna.trainer.methods.cole import log_loss
from lacuna.trainer.methods.entropy import entropy_entries
from lacuna.trainer.methods.score_table import PseudoPositiveSettings, TableMethod, pseudo_positives


class VlplSettings(PseudoPositiveSettings):
    entropy_weight: float = Field(0.1, ge=0)
    """α: COCO and NUS 0.1, VOC 0.2, CUB 0.01."""
    pseudo_weight: float = Field(0.7, ge=0)
    """w of a pseudo-positive."""
    smoothing: float = Field(0.1, ge=0, le=0.5)
    """e: a pseudo-positive's target is 1 − e."""


class Vlpl(TableMethod[VlplSettings]):
    """An unknown entry with a table score above the threshold is a pseudo-positive; nothing changes over the epochs.

    The published scores are CLIP ViT-L/14-336's softmax over the classes with temperature 0.01. They are of the image
    without augmentation here (published: of the flipped training view). A verified negative is nl(1 − p).
    """

    paper = "Xing et al., Vision-Language Pseudo-Labels for Single-Positive Multi-Label Learning, CVPRW 2024"

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        chosen = pseudo_positives(step.state.read("scores"), batch.labels, settings.threshold, settings.top_k, False)
        as_positive, as_negative = log_loss(outputs.logits)
        pseudo = (1 - settings.smoothing) * as_positive + settings.smoothing * as_negative
        entries = entropy_entries(outputs.logits, batch.labels, settings.entropy_weight)
        return LossTerms(torch.where(chosen, settings.pseudo_weight * pseudo, entries).mean(1))
