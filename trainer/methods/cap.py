"""CAP: pseudo-labels whose share in every class is that of labelled images; Xie et al. (NeurIPS 2023).

Reduction: **sum** over classes and the global batch, as published (see asl.py).
Between epochs, from the w-th on, a pass scores all samples. f_c is the share of class c among images without an unknown
label (else among its known labels), U_c the number of its unknown entries. Of these the int(r⁺·f_c·U_c) highest become
positive and the int(r⁻·(1 − f_c)·U_c) lowest negative, exactly; what lies between is left out. The loss is ASL of known
and pseudo-labelled entries alike. A class without a known label of either kind gets no pseudo-labels.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field as StateField
from lacuna.state_store.cutoffs import Cutoffs
from lacuna.trainer.methods.asl import Asl, AslSettings
from lacuna.trainer.methods.base import EpochStart, LossTerms, Masked, Needs, Outputs, Step, Task, positive, unknown
from lacuna.trainer.methods.cutoff_state import CUTOFF_STATE, from_tensors, to_tensors
from lacuna.trainer.methods.ranked_logits import APART, LARGEST, first_counts, score_field

_KINDS = ("positive", "negative")


class CapSettings(AslSettings):
    warmup_epochs: int = Field(12, ge=1)
    """w: epochs of the run in which known labels learn alone (published: 12 of 40)."""
    positive_share: float = Field(1.0, ge=0, le=1)
    """r⁺: of the expected positives among the unknown entries, those that get a label."""
    negative_share: float = Field(0.998, ge=0, le=1)
    """r⁻: likewise of the expected negatives (published: 1, cut to 0.998)."""


class Cap(Asl):
    """For a fully labelled part and an unlabelled or partly labelled rest.

    One uint16 per entry holds the logit of the last pass; exact cut-offs over all samples say which entries are taken,
    and ties are broken by a hash. As published but for: predictions come from the weights as they are, not from their
    average; labelled and other images learn in one batch; strong augmentation is data.augment's.
    """

    paper = ("Xie et al., Class-Distribution-Aware Pseudo-Labeling for Semi-Supervised Multi-Label Learning, "
             "NeurIPS 2023")
    settings_type = CapSettings
    settings: CapSettings  # type: ignore[assignment]
    class_state: ClassVar = {f"{kind}.{name}": shape for kind in _KINDS for name, shape in CUTOFF_STATE.items()}

    def __init__(self, settings: CapSettings, task: Task):
        super().__init__(settings, task)
        self.cutoffs: dict[str, Cutoffs] = {}

    def needs(self) -> Needs:
        return Needs(negatives=True, scored_pass=True)

    def fields(self) -> list[StateField]:
        return [score_field(self.task)]

    def initial_counts(self) -> dict[str, np.ndarray]:
        return first_counts(self.task)

    def quotas(self, complete: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(highest that become positive, highest that do not become negative) per class; `complete` int64 [L]:
        positives in the `count` images without an unknown label."""
        settings, task = self.settings, self.task
        known = task.positives + task.negatives
        share = complete / count if count else task.positives / np.maximum(1, known)
        unknowns = np.where(known > 0, task.samples - known, 0)
        highest = (settings.positive_share * share * unknowns + 1e-9).astype(np.int64)
        lowest = (settings.negative_share * (1 - share) * unknowns + 1e-9).astype(np.int64)
        rest = task.samples - known - np.where(known > 0, np.minimum(lowest, unknowns - highest), 0)
        return highest, rest

    def begin_epoch(self, start: EpochStart) -> None:
        self.cutoffs = {}
        if start.overall < self.settings.warmup_epochs:
            return
        complete = torch.zeros(self.task.classes + 1, dtype=torch.int64, device=start.world.device)
        for scored in start.scored():
            labels = scored.batch.labels.to(start.world.device)
            whole = ~unknown(labels).any(1)
            complete += torch.cat([(positive(labels) & whole[:, None]).sum(0), whole.sum()[None]])
            score = scored.outputs.logits.clamp(-LARGEST, LARGEST) + APART
            scored.state.write({"score": Masked(score, unknown(labels))})
        found = start.world.global_sum(complete).cpu().numpy()
        for kind, quota in zip(_KINDS, self.quotas(found[:-1], int(found[-1])), strict=True):
            self.cutoffs[kind] = start.state.cutoffs("score", quota, start.overall)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        is_positive, used = positive(batch.labels), ~unknown(batch.labels)
        if self.cutoffs:
            highest, rest = (step.state.selected("score", self.cutoffs[kind]) for kind in _KINDS)
            is_positive = is_positive | (highest & ~used)
            used = used | highest | ~rest
        entries = self.entries(outputs.logits, is_positive)
        return LossTerms(torch.where(used, entries, 0.0).sum(1) * step.samples)

    def state(self) -> dict[str, torch.Tensor]:
        return {f"{kind}.{name}": value for kind, cutoffs in self.cutoffs.items()
                for name, value in to_tensors(cutoffs).items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.cutoffs = {}
        for kind in _KINDS if state else ():
            found = from_tensors({name.partition(".")[2]: value for name, value in state.items()
                                  if name.startswith(kind)})
            assert found is not None
            self.cutoffs[kind] = found
