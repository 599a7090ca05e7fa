"""EM and EM+APL: entropy maximisation on unknown entries, asymmetric pseudo-labelling; Zhou et al. (ECCV 2022).

Reduction: sum over classes / L, mean over the global batch. Log terms are nl(p) = −ln(p + 1e-5), as in Cole et al.
EM: positives nl(p), unknown entries −α·[p·nl(p) + (1 − p)·nl(1 − p)].
EM+APL: between epochs, from the w-th on, the M_i = int(θ·U_i / (T − w)) lowest predictions among the still unknown
entries of class i become pseudo-negatives for good, with the prediction ŷ of that moment as soft target; their loss is
β·[ŷ·nl(p) + (1 − ŷ)·nl(1 − p)]. U_i: unknown entries of class i at first; T: epochs of the phase.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field as StateField
from lacuna.state_store.cutoffs import Cutoffs
from lacuna.trainer.methods.base import (
    EpochStart,
    LossTerms,
    Masked,
    Method,
    Needs,
    Outputs,
    Settings,
    Step,
    negative,
    positive,
    unknown,
)
from lacuna.trainer.methods.cole import log_loss
from lacuna.trainer.methods.cutoff_state import CUTOFF_STATE, from_tensors, to_tensors
from lacuna.trainer.methods.ranked_logits import APART, LARGEST, first_counts, score_field

PAPER = "Zhou et al., Acknowledging the Unknown for Multi-Label Learning with Single Positive Labels, ECCV 2022"


class EntropySettings(Settings):
    entropy_weight: float = Field(0.1, ge=0)
    """α: COCO and NUS 0.1, VOC 0.2, CUB 0.01."""


class EntropyMaximization(Method[EntropySettings]):
    """Positives as usual, unknown entries pushed towards p = ½. A verified negative (the paper has none) is −ln(1 − p).

    For thresholded metrics use 0.75: unknown entries settle near 0.5.
    """

    paper = PAPER

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        return LossTerms(entropy_entries(outputs.logits, batch.labels, settings.entropy_weight).mean(1))


def entropy_entries(logits: torch.Tensor, labels: torch.Tensor, weight: float) -> torch.Tensor:
    """EM's loss [B, L] entry by entry."""
    as_positive, as_negative = log_loss(logits)
    entropy = torch.sigmoid(logits) * as_positive + torch.sigmoid(-logits) * as_negative
    known = torch.where(positive(labels), as_positive, as_negative)
    return torch.where(positive(labels) | negative(labels), known, -weight * entropy)


class PseudoNegativeSettings(EntropySettings):
    pseudo_weight: float = Field(0.9, ge=0)
    """β: COCO 0.9, VOC 0.02, NUS 0.2, CUB 0.4."""
    warmup_epochs: int = Field(5, ge=1)
    """w: epochs of the phase before the first pseudo-negatives (VOC and COCO 5, NUS 4, CUB 3)."""
    proportion: float = Field(0.9, ge=0, le=1)
    """θ: share of the unknown entries that are pseudo-negatives in the end."""


class PseudoNegatives(EntropyMaximization):
    """EM+APL. The lowest predictions of a class over all samples are found exactly, out of core.

    One uint16 per entry holds the negated logit: as a candidate (positive values, rewritten by every pass), or as the
    frozen prediction of an assigned entry (negative values). The pass between two epochs writes the candidates; the
    exact cut-offs of the classes then say which are chosen. An entry is marked when its sample is visited in the epoch
    that follows: as each row is visited once and cut-offs stand still, that is the same as marking it in the pass.
    Predictions come from the image without random augmentation (the authors: with a random flip); logits are rounded to
    1/512 and ties are broken by a hash. Published early stopping with patience 0 is not part of the method.
    """

    settings_type = PseudoNegativeSettings
    settings: PseudoNegativeSettings
    class_state = CUTOFF_STATE
    cutoffs: Cutoffs | None = None

    def fields(self) -> list[StateField]:
        return [score_field(self.task)]

    def initial_counts(self) -> dict[str, np.ndarray]:
        return first_counts(self.task)

    def needs(self) -> Needs:
        return Needs(scored_pass=True, epochs=True)

    def quotas(self, epochs: int) -> np.ndarray:
        """M_i."""
        settings = self.settings
        unknowns = self.task.samples - self.task.positives - self.task.negatives
        return (settings.proportion * unknowns / max(1, epochs - settings.warmup_epochs)).astype(np.int64)

    def begin_epoch(self, start: EpochStart) -> None:
        self.cutoffs = None
        if start.epoch < self.settings.warmup_epochs:
            return
        for scored in start.scored():
            score = -scored.outputs.logits.clamp(-LARGEST, LARGEST) + APART
            candidate = unknown(scored.batch.labels) & (scored.state.read("score") > -1)
            scored.state.write({"score": Masked(score, candidate)})
        self.cutoffs = start.state.cutoffs("score", self.quotas(start.epochs), start.overall)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        score, rows = step.state.read("score"), {}
        if self.cutoffs is not None:
            chosen = step.state.selected("score", self.cutoffs) & unknown(batch.labels) & (score > 1)
            score = torch.where(chosen, score - 2 * APART, score)
            rows = {"score": Masked(score, chosen)}
        target = torch.sigmoid(-(score + APART))
        as_positive, as_negative = log_loss(outputs.logits)
        pseudo = settings.pseudo_weight * (target * as_positive + (1 - target) * as_negative)
        entries = entropy_entries(outputs.logits, batch.labels, settings.entropy_weight)
        return LossTerms(torch.where(score < -1, pseudo, entries).mean(1), rows=rows)  # type: ignore[arg-type]

    def state(self) -> dict[str, torch.Tensor]:
        return to_tensors(self.cutoffs)

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.cutoffs = from_tensors(state)
