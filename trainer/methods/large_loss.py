"""LL-R, LL-Ct and LL-Cp: large losses among the assumed negatives are dropped or flipped, Kim et al. (CVPR 2022).

Reduction: mean over classes and the global batch; a dropped entry stays in the denominator. The base is AN with the
exact binary cross-entropy. Of all B·L entries of the global batch a share r = (epochs so far)·Δ is modified:
θ is the k-th largest loss of unknown entries, k = ceil(B·L·r), and every unknown entry with a loss ≥ θ counts.
LL-Cp modifies a share of Δ in every epoch after the first, and remembers it: its rows of labels are in the store.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field as StateField
from lacuna.trainer.methods.base import LossTerms, Method, Needs, Outputs, Settings, Step, positive, unknown
from lacuna.trainer.methods.corrected import CORRECTED, corrected_field, with_corrected
from lacuna.trainer.methods.top_entries import global_cutoff

PAPER = "Kim et al., Large Loss Matters in Weakly Supervised Multi-Label Classification, CVPR 2022"


class RejectSettings(Settings):
    delta_percent: float = Field(0.4, gt=0, le=100)
    """Δ: the modified share grows by this much an epoch (authors: VOC 0.2, COCO, NUS and CUB 0.4)."""


class CorrectSettings(RejectSettings):
    delta_percent: float = Field(0.2, gt=0, le=100)
    """Δ: the modified share grows by this much an epoch (authors: VOC, COCO and NUS 0.2, CUB 0.4)."""


class PermanentSettings(CorrectSettings):
    delta_percent: float = Field(0.2, gt=0, le=100)
    """Δ: the share that is corrected in every step after the first epoch (authors: VOC 0.1, COCO, NUS and CUB 0.2)."""


class Reject(Method[RejectSettings]):
    """LL-R: large losses are set to 0. The first epoch of a phase is plain AN."""

    paper = PAPER

    def needs(self) -> Needs:
        return Needs(whole_batch=True)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        entries, _ = self.modify(outputs.logits, batch.labels, step)
        return LossTerms(entries.mean(1))

    def modify(self, logits: torch.Tensor, labels: torch.Tensor,
               step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(losses, which of them were modified), both [B, L]; None if none is to be modified in this epoch."""
        entries, count = assume_negative(logits, labels), self.modified(step)
        if not count:
            return entries, None
        large = large_losses(entries, labels, count, step)
        return torch.where(large, self.replacement(logits), entries), large

    def modified(self, step: Step) -> int:
        """k: how many entries of the global batch are modified."""
        share = step.epoch * self.settings.delta_percent / 100
        return modified_entries(step.samples * self.task.classes, share)

    def replacement(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits)


class CorrectTemporarily(Reject):
    """LL-Ct: entries with large losses count as positives in this step."""

    settings_type = CorrectSettings

    def replacement(self, logits: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(logits)


class CorrectPermanently(CorrectTemporarily):
    """LL-Cp: entries with large losses are positives from this step on; the label row is written after the step.

    This is the method that the paper states: in the authors' released code a comparison by identity never holds, so
    that what it runs as LL-Cp is LL-Ct. A corrected entry counts as annotated and is not ranked again.
    """

    settings_type = PermanentSettings

    def fields(self) -> list[StateField]:
        return [corrected_field(self.task.classes)]

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        corrected = step.state.read(CORRECTED)
        entries, large = self.modify(outputs.logits, with_corrected(batch.labels, corrected), step)
        return LossTerms(entries.mean(1), rows={} if large is None else {CORRECTED: corrected | large})

    def modified(self, step: Step) -> int:
        share = min(step.epoch, 1) * self.settings.delta_percent / 100
        return modified_entries(step.samples * self.task.classes, share)


def assume_negative(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Exact binary cross-entropy [B, L]; whatever is not positive counts as negative."""
    return -F.logsigmoid(torch.where(positive(labels), logits, -logits))


def modified_entries(entries: int, share: float) -> int:
    """ceil(entries · share); rounded first, so that 3 · 0.1 % of 1,000 entries are 3 and not 4."""
    return min(entries, math.ceil(round(entries * share, 6)))


def large_losses(entries: torch.Tensor, labels: torch.Tensor, count: int, step: Step) -> torch.Tensor:
    """Unknown entries [B, L] whose loss reaches the `count`-th largest of the global batch, where known ones rank as 0.

    If that is 0 because fewer entries are unknown, the released code modifies known entries too; here they never are.
    """
    of_unknown = torch.where(unknown(labels), entries.detach(), 0.0)
    return unknown(labels) & (of_unknown >= global_cutoff(of_unknown, count, step.world))
