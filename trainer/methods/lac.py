"""LAC: two views agree on confident entries, and a queue contrasts class-wise features; Xie et al. (NeurIPS 2022).

loss = AN(first view) + λ·PLC, and from `contrast_phase` on + λ_c·contrast; means over the global batch, exact BCE.
PLC: c = σ(a) + [annotated], without gradient; entries with c ≥ τ or c < 1 − τ count, with target [c ≥ τ], as the mean
binary cross-entropy of the strong view over them.
Contrast: features of both views of every entry with c ≥ τ_c enter a queue of 512; supervised contrastive loss over
its entries × 2 views at temperature T, positives are entries of the same class and the other view; gradients flow
through this batch's entries only.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from lacuna.data_pipelines.stream import Batch
from lacuna.trainer.methods.all_ranks import rows_of_all_ranks
from lacuna.trainer.methods.base import LossTerms, Method, Needs, Outputs, Settings, Step, Task, negative, positive
from lacuna.trainer.methods.large_loss import assume_negative
from lacuna.trainer.methods.top_entries import global_top


class LacSettings(Settings):
    consistency: float = Field(1.0, ge=0)
    """λ of PLC."""
    threshold: float = Field(0.6, ge=0.5, le=1)
    """τ of PLC before the contrast starts."""
    contrast_phase: int = Field(1, ge=0)
    """Phase (from 0) from which on features are contrasted, with the stricter threshold; it starts from the best epoch
    of the phase before it, as published."""
    contrast: float = Field(1.0, ge=0)
    """λ_c of the contrast."""
    contrast_threshold: float = Field(0.9, ge=0.5, le=1)
    """τ (PLC) and τ_c once the contrast has started."""
    temperature: float = Field(0.5, gt=0)
    """T of the contrast."""
    queue: int = Field(512, ge=2)
    """Entries in the queue; of a batch with more confident entries the most confident are taken (released: a crash)."""
    embedding: int = Field(128, ge=1)
    """Width of the contrasted features."""


class Lac(Method[LacSettings]):
    """Label-aware global consistency on the 1×1 head.

    Replaced: the published head attends to features with a query per class (Query2Label). Here a class's feature is the
    mean of the feature map weighted by the softmax of the class's score map over the cells, and two linear layers
    project it, as published. A verified negative is a negative in every term.
    """

    paper = ("Xie et al., Label-Aware Global Consistency for Multi-Label Learning with Single Positive Labels, "
             "NeurIPS 2022")
    class_state: ClassVar = {"queue": "float32 [512, 2, 128]", "classes": "int64 [512]", "pointer": "int64 [1]"}

    def __init__(self, settings: LacSettings, task: Task):
        super().__init__(settings, task)
        self.queue = Queue.empty(settings.queue, settings.embedding)
        self.projector = nn.Sequential(nn.Linear(task.width, task.width), nn.ReLU(),
                                       nn.Linear(task.width, settings.embedding))

    def needs(self) -> Needs:
        return Needs(maps=True, strong_view=True, whole_batch=True)

    def module(self) -> nn.Module:
        return self.projector

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        strong = step.forward(batch.strong_view)
        started = step.phase >= settings.contrast_phase
        threshold = settings.contrast_threshold if started else settings.threshold
        sure = torch.sigmoid(outputs.logits.detach()) + positive(batch.labels)
        sure = torch.where(negative(batch.labels), 0.0, sure)
        own = assume_negative(outputs.logits, batch.labels).mean(1)
        agree = agreement(strong.logits, sure, threshold, step)
        projected, classes = self._entries(outputs, strong, sure, threshold if started else torch.inf, step)
        self.queue, value = self.queue.contrast(projected, classes, settings.temperature)
        return LossTerms(own + settings.consistency * agree, settings.contrast * value)

    def _entries(self, outputs: Outputs, strong: Outputs, sure: torch.Tensor, threshold: float,
                 step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(features [M, 2, E] of all ranks' confident entries, their classes [M]), the most confident if too many.

        The projector runs even without entries: every parameter has a gradient on every rank.
        """
        size = self.settings.queue
        places, chosen = global_top(torch.where(sure >= threshold, sure, -torch.inf), size, step.world)
        mine = places[chosen].sort().values
        rows, classes = mine // sure.shape[1], mine % sure.shape[1]
        views = [F.normalize(self.projector(attended(view, rows, classes)), dim=1) for view in (outputs, strong)]
        features, classes = rows_of_all_ranks(step.world, torch.stack(views, 1), classes)
        return features, classes

    def state(self) -> dict[str, torch.Tensor]:
        return {"queue": self.queue.features, "classes": self.queue.classes, "pointer": self.queue.pointer}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.queue = Queue(state["queue"], state["classes"], state["pointer"])


class Queue:
    """First in, first out; a batch that would reach the end is written at the start."""

    def __init__(self, features: torch.Tensor, classes: torch.Tensor, pointer: torch.Tensor):
        self.features, self.classes, self.pointer = features, classes, pointer  # [S, 2, E], [S] (−1: empty), [1]

    @classmethod
    def empty(cls, size: int, width: int) -> Queue:
        return cls(torch.zeros(size, 2, width), torch.full((size,), -1), torch.zeros(1, dtype=torch.int64))

    def contrast(self, features: torch.Tensor, classes: torch.Tensor, temperature: float) -> tuple[Queue, torch.Tensor]:
        """The queue with this batch in it, and the contrastive loss over it."""
        size, count, at = len(self.classes), len(classes), int(self.pointer)
        at = 0 if at + count >= size else at  # ≥: a batch that would just fit goes to the start, as published
        held, labels = self.features.to(features).clone(), self.classes.to(classes.device).clone()
        held[at : at + count], labels[at : at + count] = features, classes
        valid = labels >= 0  # a prefix: every batch begins where the one before ended, or at the start
        value = contrastive(held[valid], labels[valid], temperature)
        return Queue(held.detach().cpu(), labels.cpu(), torch.tensor([at + count])), value


def agreement(strong: torch.Tensor, sure: torch.Tensor, threshold: float, step: Step) -> torch.Tensor:
    """PLC [B], scaled so that the mean over the global batch's samples is the mean over its confident entries."""
    counted = (sure >= threshold) | (sure < 1 - threshold)
    entries = -F.logsigmoid(torch.where(sure >= threshold, strong, -strong))
    total = step.world.global_sum(counted.sum())
    return torch.where(counted, entries, 0.0).sum(1) * step.samples / total.clamp(min=1)


def attended(view: Outputs, rows: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """[M, D]: for each (image, class) the features under the class's attention."""
    weights = view.maps[rows, classes].flatten(1).softmax(1)  # [M, cells]
    features = view.features.to(weights.dtype).flatten(2)  # [B, D, cells]
    # Image by image: features of every entry at once would be M copies of a feature map.
    parts = [weights[rows == row] @ features[row].T for row in rows.unique().tolist()]
    return torch.cat(parts) if parts else weights.new_zeros((0, features.shape[1]))


def contrastive(features: torch.Tensor, classes: torch.Tensor, temperature: float) -> torch.Tensor:
    """Supervised contrastive loss of unit features [V, 2, E]; 0 if there are none."""
    every, labels = features.flatten(0, 1), classes.repeat_interleave(2)
    if not len(every):
        return features.sum()
    alone = torch.eye(len(every), dtype=torch.bool, device=every.device)
    near = (every @ every.T / temperature).masked_fill(alone, -torch.inf)
    log_share = near - near.logsumexp(1, keepdim=True)
    same = (labels[:, None] == labels) & ~alone
    return -(torch.where(same, log_share, 0.0).sum(1) / same.sum(1)).mean()
