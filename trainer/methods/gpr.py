"""GPR and AEVLP: GR with pseudo-positives from tables of scores, Tran et al. (ICCV 2025).

Reduction: mean over classes and the global batch, plus reg·((mean number of predicted positives − k)/L)². Positives
and other unknown entries as in GR (gr.py); pseudo-positives u·[ρ·(−ln p) + (1 − ρ)·(−ln(1 − p))], where u = 1 − V is
kept within [λ2, λ1].
DAMP's scores, from the whole image (S_g) and its g × g crops: η_n = min(S_g of the annotated class, η),
S = ½(S_g + (largest of the crops if that is above η_n, else the smallest)).
"""

from __future__ import annotations

import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Needs, Outputs, Step, Task, expected_positives, positive
from lacuna.trainer.methods.cole import expected_positives_penalty
from lacuna.trainer.methods.gr import GrSettings, Schedule, known_or, pseudo_positive_entries, robust_entries
from lacuna.trainer.methods.score_table import PseudoPositiveSettings, TableMethod, pseudo_positives

_PAPER = ("Tran et al., More Reliable Pseudo-Labels, Better Performance: A Generalized Approach to Single Positive "
          "Multi-Label Learning, ICCV 2025")


class GprSettings(PseudoPositiveSettings, GrSettings):
    threshold: float = Field(0.5, ge=0)
    """Least score of a pseudo-positive (VOC and COCO 0.5, NUS 0.6, CUB 0.005)."""
    top_k: int = Field(3, ge=0)
    """Only the k highest scores of an image can be pseudo-positives (CUB 32); 0 = no limit."""
    most: float = Field(0.7, ge=0, le=1)
    """λ1, largest weight of a pseudo-positive (CUB 0.8)."""
    least: float = Field(0.5, ge=0, le=1)
    """λ2, smallest weight of a pseudo-positive (VOC 0.4, COCO and NUS 0.5, CUB 0.2)."""
    target: float = Field(0.9, ge=0, le=1)
    """ρ, a pseudo-positive's target."""
    regularizer: float = Field(0.001, ge=0)
    """Weight of the pull towards k positives per image (VOC 0.05, COCO and NUS 0.001, CUB 0.01); 0 = off."""


class Gpr(TableMethod[GprSettings]):
    """GR, and what a table calls positive. Any table will do: a vision-language model's scores, or another run's."""

    paper = _PAPER

    def __init__(self, settings: GprSettings, task: Task):
        super().__init__(settings, task)
        self.k = expected_positives(task) if settings.regularizer else 0.0

    def needs(self) -> Needs:
        return Needs(scores=self.tables, whole_batch=True, epochs=True)

    def scores(self, labels: torch.Tensor, step: Step) -> torch.Tensor:
        return step.state.read("scores")

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        logits, schedule = outputs.logits, Schedule.at(settings, step.epoch, step.epochs)
        chosen = pseudo_positives(self.scores(batch.labels, step), batch.labels, settings.threshold, settings.top_k)
        pseudo = pseudo_positive_entries(logits, schedule, settings.most, settings.least, settings.target)
        robust = robust_entries(logits, schedule, settings.q_positive, settings.q_negative)
        entries = known_or(logits, batch.labels, torch.where(chosen, pseudo, robust))
        if not settings.regularizer:
            return LossTerms(entries.mean(1))
        pull = settings.regularizer * expected_positives_penalty(torch.sigmoid(logits), self.k, step)
        return LossTerms(entries.mean(1), pull)


class AevlpSettings(GprSettings):
    eta: float = Field(0.3, ge=0)
    """η: largest score that the best crop must exceed (VOC 0, COCO and NUS 0.3, CUB 0.005)."""


class Aevlp(Gpr):
    """GPR with DAMP's pseudo-positives, from three tables: `global`, `crop_max` and `crop_min`.

    The published scores are softmaxes of CLIP ViT-B/16 with temperature 0.01 (CUB 0.1), of 4 × 4 crops (CUB 5 × 5).
    Several annotated positives: the lowest of their scores counts; none: η. The published pseudo-negatives never reach
    the loss in the authors' code, and are not here.
    """

    settings_type = AevlpSettings
    tables = ("global", "crop_max", "crop_min")
    settings: AevlpSettings

    def scores(self, labels: torch.Tensor, step: Step) -> torch.Tensor:
        whole, best, worst = (step.state.read(name) for name in self.tables)
        return damp_scores(whole, best, worst, labels, self.settings.eta)


def damp_scores(whole: torch.Tensor, best: torch.Tensor, worst: torch.Tensor, labels: torch.Tensor,
                eta: float) -> torch.Tensor:
    """S [B, L]."""
    bar = torch.where(positive(labels), whole, eta).clamp(max=eta).amin(1, keepdim=True)
    return (whole + torch.where(best > bar, best, worst)) / 2
