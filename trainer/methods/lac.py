"""LAC: two views agree on confident entries, and a queue contrasts class-wise features; Xie et al. (NeurIPS 2022).

loss = AN(first view) + λ·PLC, and from `contrast_phase` on + λ_c·contrast; means over the global batch, exact BCE.
PLC: c = σ(a) + [annotated], without gradient; entries with c ≥ τ or c < 1 − τ count, with target [c ≥ τ], as the mean
binary cross-entropy of the strong view over them.
Contrast: class-wise features of both views of every entry with c ≥ τ_c enter a queue of 512; supervised contrastive
loss over its entries × 2 views at temperature T, positives are entries of the same class and the other view;
gradients flow through this batch's entries only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Needs, Outputs, Settings, Step, Task, negative, positive
from lacuna.trainer.methods.large_loss import assume_negative
from lacuna.trainer.methods.top_entries import global_top
from lacuna.trainer.on_device.uploads import to_device

_AT_ONCE = 64  # feature maps that are copied at a time, and again in the backward: all would be too much memory


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
    """Label-aware global consistency.

    With model.head=query2label (or ml_decoder with a query for every class) a class's feature is what its query
    gathered, as published. With other heads, replaced: it is the mean of the feature map weighted by the softmax of the
    class's score map over the cells. Two linear layers project it, as published. A verified negative is a negative in
    every term.
    """

    paper = ("Xie et al., Label-Aware Global Consistency for Multi-Label Learning with Single Positive Labels, "
             "NeurIPS 2022")
    class_state: ClassVar = {"queue": "float32 [512, 2, 128]", "classes": "int64 [512]", "pointer": "int64 [1]"}

    def __init__(self, settings: LacSettings, task: Task):
        super().__init__(settings, task)
        self.queue = Queue.empty(settings.queue, settings.embedding)
        self.width = task.class_width or task.width
        self.projector = nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(),
                                       nn.Linear(self.width, settings.embedding))

    def needs(self) -> Needs:
        queries = self.task.class_width > 0
        return Needs(maps=not queries, class_features=queries, strong_view=True, whole_batch=True)

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
        terms = LossTerms(own + settings.consistency * agreement(strong.logits, sure, threshold, step))
        if started:
            entries = self._entries(outputs, strong, sure, threshold, step)
            self.queue, value = self.queue.contrast(entries, settings.temperature)
            terms.coupled = settings.contrast * value
        else:  # every parameter has a gradient on every rank
            terms.coupled = self.projector(outputs.logits.new_zeros((0, self.width))).sum()
        return terms

    def _entries(self, outputs: Outputs, strong: Outputs, sure: torch.Tensor, threshold: float, step: Step) -> Entries:
        """All ranks' confident entries in the order of their places, the most confident if there are too many."""
        size, world = self.settings.queue, step.world
        places, chosen = global_top(torch.where(sure >= threshold, sure, -torch.inf), size, world)
        places = torch.where(chosen, places, sure.numel() - 1).sort().values  # those not chosen repeat the last place
        if not len(sure):  # the projector still runs: every parameter has a gradient on every rank
            places = places[:0]
        rows, classes = places // sure.shape[1], places % sure.shape[1]
        views = [F.normalize(self.projector(self._features(view, rows, classes)), dim=1) for view in (outputs, strong)]
        counts = world.all_gather(chosen.sum())
        # Behind those of the ranks before, as many as were chosen: all that the sum over ranks sees.
        at, mine = shifted(counts[: world.rank].sum(), counts[world.rank], size, size)
        missing = size - len(places)
        features = F.pad(torch.stack(views, 1), (0, 0, 0, 0, 0, missing))[at]
        classes = F.pad(classes, (0, missing))[at]
        return Entries(world.global_sum(torch.where(mine[:, None, None], features, 0.0)),
                       world.global_sum(torch.where(mine, classes, 0)), counts.sum())

    def _features(self, view: Outputs, rows: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """[M, W]: of each (image, class)."""
        if self.task.class_width:
            return view.features[rows, classes].to(view.logits.dtype)
        return attended(view, rows, classes)

    def state(self) -> dict[str, torch.Tensor]:
        return {"queue": self.queue.features, "classes": self.queue.classes, "pointer": self.queue.pointer}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.queue = Queue(state["queue"], state["classes"], state["pointer"])


@dataclass(frozen=True)
class Entries:
    """The first `count` are there; shapes that depended on it would make the host wait for the device."""

    features: torch.Tensor  # [K, 2, E]
    classes: torch.Tensor  # [K]
    count: torch.Tensor


class Queue:
    """First in, first out; a batch that would reach the end is written at the start."""

    def __init__(self, features: torch.Tensor, classes: torch.Tensor, pointer: torch.Tensor):
        self.features, self.classes, self.pointer = features, classes, pointer  # [S, 2, E], [S] (−1: empty), [1]

    @classmethod
    def empty(cls, size: int, width: int) -> Queue:
        return cls(torch.zeros(size, 2, width), torch.full((size,), -1), torch.zeros(1, dtype=torch.int64))

    def contrast(self, new: Entries, temperature: float) -> tuple[Queue, torch.Tensor]:
        """The queue with this batch in it, on the device, and the contrastive loss over it."""
        device, size = new.features.device, len(self.classes)
        pointer = to_device(self.pointer, device)
        # ≥: a batch that would just fit goes to the start, as published.
        start = torch.where(pointer + new.count >= size, 0, pointer)
        at, fresh = shifted(start, new.count, size, len(new.classes))
        held = to_device(self.features, device).to(new.features.dtype)
        held = torch.where(fresh[:, None, None], new.features[at], held)
        classes = torch.where(fresh, new.classes[at], to_device(self.classes, device))
        return Queue(held.detach().float(), classes, start + new.count), contrastive(held, classes, temperature)


def shifted(start: torch.Tensor, count: torch.Tensor, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """If the first `count` of `length` items move to `start`: for each of `size` places, (which item, whether one)."""
    item = torch.arange(size, device=count.device) - start
    return item.clamp(0, length - 1), (item >= 0) & (item < count)


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
    parts = [checkpoint(_weighted, features, *part, use_reentrant=False, preserve_rng_state=False)
             for part in zip(rows.split(_AT_ONCE), weights.split(_AT_ONCE), strict=True)]
    return torch.cat(parts)


def _weighted(features: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (features[rows] @ weights[:, :, None])[:, :, 0]


def contrastive(features: torch.Tensor, classes: torch.Tensor, temperature: float) -> torch.Tensor:
    """Supervised contrastive loss of unit features [V, 2, E], those of class −1 left out; 0 if there are none."""
    every, labels = features.flatten(0, 1), classes[:, None].expand(-1, 2).flatten()
    there, alone = labels >= 0, torch.eye(len(labels), dtype=torch.bool, device=every.device)
    # A row that is left out sees only itself, so that its logsumexp stays finite.
    seen = torch.where(there[:, None], there & ~alone, alone)
    near = (every @ every.T / temperature).masked_fill(~seen, -torch.inf)
    log_share = near - near.logsumexp(1, keepdim=True)
    same = (labels[:, None] == labels) & seen & there
    means = torch.where(same, log_share, 0.0).sum(1) / same.sum(1).clamp(min=1)
    return -means.sum() / there.sum().clamp(min=1)
