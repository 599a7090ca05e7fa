"""Scob's label-correlation contrast on top of ROLE, Chen, Zhao and Li (IJCV 2023).

loss = ROLE(first view) + λ·contrast, the mean over images with an annotated positive, c (of several the likeliest).
With model.head=masked_transformer (decoders/masked.py) an image is seen through c's Grad-CAM++ (activation.py): f is
the vector that the slow copy of the transformers has of the first view through its masks, f' that of the transformers
of the second. With other heads it is seen through c's score map: f and f' are the means of both views' features over
the cells whose score is at least halfway between the map's least and highest. With the projector h and e_j, the feature
f of the surest image of class j in this epoch so far (by the logit of j, as it was then):
    contrast = −log( exp(s₀/T) / (exp(s₀/T) + Σ_j exp(w_cj·s_j/T)) )
    s₀ = 1 + cos(h(f'), f),  s_j = 1 + cos(h(f'), e_j),  w_cj = 1 − r_cj²
    r_cj = mean(ỹ_c·ỹ_j) / mean(ỹ_c) over all samples' label estimates ỹ before the epoch, r_cc = 1
Gradients flow through h(f') only. A class without e_j: e_j = 0 with masks, as published; no term with other heads.
Legend: B batch, L classes, D channels, G grid side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.all_ranks import rows_of_all_ranks
from lacuna.trainer.methods.base import EpochStart, LossTerms, Needs, Outputs, Step, Task, positive
from lacuna.trainer.methods.role.method import EstimateSettings, Role
from lacuna.trainer.on_device.uploads import to_device

if TYPE_CHECKING:
    from lacuna.trainer.sample_state import NoState, SampleState


class ScobSettings(EstimateSettings):  # k of ROLE (model.expected_positives) by the authors: VOC 1.5, COCO 3.9
    estimator: Literal["dense"] = "dense"
    """A logit for every entry: the correlation is taken from them."""
    contrast: float = Field(0.1, ge=0)
    """λ."""
    contrast_phase: int = Field(0, ge=0)
    """Phase (from 0) from which on features are contrasted (published: 0, on a trained backbone)."""
    temperature: float = Field(1.0, gt=0)
    """T."""
    keep: float = Field(0.5, ge=0, le=1)
    """Where between a map's least and highest score a cell begins to count."""
    momentum: float = Field(0.999, ge=0, le=1)
    """Of the slow copy (masked_transformer). 1: it stays as the transformers were at first, as in the released code."""
    correlation: bool = True
    """False takes r_cj as 0 between different classes, as the released code does when it runs."""


class Scob(Role):
    """ROLE and the contrast, with model.head=masked_transformer as its released code states it.

    Differences: both losses are minimised in one step, by one learning rate (published: one after the other; linear
    parts 1e-3, transformers 4e-5, projector 1e-2), so that Grad-CAM++ is of the weights before ROLE's step; an image of
    which nothing is seen is left out (released: its whole batch); the copy moves, which the released one never does
    (momentum: 1). ROLE's estimates start within ±0.41 logits (published: ±1.39).
    Every rank holds L² correlations. With other heads f are the backbone's own features, through score maps; the
    contrast then reaches the classifier through the backbone alone, so that some of it has to learn.
    """

    paper = "Chen et al., Semantic Contrastive Bootstrapping for Single-Positive Multi-Label Recognition, IJCV 2023"
    settings_type = ScobSettings
    settings: ScobSettings
    class_state: ClassVar = {"phase_steps": "int64 [finished phases]", "surest": "float32 [L, D]",
                             "surest_logit": "float32 [L]", "correlation": "float32 [L, L]"}

    def __init__(self, settings: ScobSettings, task: Task):
        super().__init__(settings, task)
        self.masked, self.width = task.vector_width > 0, task.vector_width or task.width
        self.projector = nn.Sequential(nn.Linear(self.width, self.width), nn.LeakyReLU(),
                                       nn.Linear(self.width, self.width))
        self.correlation = torch.eye(task.classes)
        self._forget()

    def needs(self) -> Needs:
        return Needs(maps=not self.masked, strong_view=True, same_crop=True, backbone=not self.masked, whole_batch=True)

    def _forget(self) -> None:
        self.surest = torch.zeros(self.task.classes, self.width)  # e_j
        self.surest_logit = torch.full((self.task.classes,), -torch.inf)  # −inf: no image yet

    def module(self) -> nn.Module:
        return self.projector

    def begin_epoch(self, start: EpochStart) -> None:
        super().begin_epoch(start)
        self._forget()
        settings = self.settings
        if settings.correlation and start.phase >= settings.contrast_phase:
            self.correlation = estimated_correlation(start.state, self.task.classes)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        terms = super().loss(outputs, batch, step)
        if step.phase < settings.contrast_phase:  # every parameter has a gradient on every rank
            terms.per_sample = terms.per_sample + self.projector(outputs.logits.new_zeros((0, self.width))).sum()
            return terms
        is_positive, logits = positive(batch.labels), outputs.logits.detach()
        sure, classes = torch.where(is_positive, logits, -torch.inf).max(1)
        anchored = is_positive.any(1)
        own, other = self._seen(outputs, batch, step, classes)
        if self.masked:  # an image of which nothing is seen is the vector 0
            anchored = anchored & (own != 0).any(1)
            sure = torch.where(anchored, sure, -torch.inf)
        entries = self._contrast(self.projector(other), own, classes)
        total = step.world.global_sum(anchored.sum()).clamp(min=1)
        terms.per_sample = terms.per_sample + settings.contrast * torch.where(anchored, entries, 0.0) * (
            step.samples / total)
        self._remember(own, sure, classes, step)
        return terms

    def _seen(self, outputs: Outputs, batch: Batch, step: Step,
              classes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """f and f' [B, D] of every image's class; f without gradient."""
        logits = outputs.logits
        if self.masked:
            with torch.no_grad():
                first = step.forward(batch.inputs, of=classes, momentum=self.settings.momentum)
            second = step.forward(batch.strong_view, activation=first.maps)
            return first.features.to(logits.dtype), second.features.to(logits.dtype)
        seen = seen_cells(outputs.maps.detach(), classes, self.settings.keep)
        strong = step.forward(batch.strong_view).features
        return (mean_over(outputs.features.detach().to(logits.dtype), seen), mean_over(strong.to(logits.dtype), seen))

    def _contrast(self, query: torch.Tensor, own: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """[B]: h(f') of every image against its f and the surest of every class."""
        temperature = self.settings.temperature
        query = F.normalize(query, dim=1)
        same = 1 + (query * F.normalize(own, dim=1)).sum(1)
        self.surest, self.surest_logit, self.correlation = (  # they stay there
            to_device(kept, query.device) for kept in (self.surest, self.surest_logit, self.correlation))
        others = 1 + query @ F.normalize(self.surest.to(query.dtype), dim=1).T
        weights = 1 - self.correlation[classes].to(query.dtype).square()
        others = weights * others
        if not self.masked:
            others = others.masked_fill(self.surest_logit == -torch.inf, -torch.inf)
        every = torch.cat([same[:, None], others], 1) / temperature
        return every.logsumexp(1) - every[:, 0]

    def _remember(self, features: torch.Tensor, sure: torch.Tensor, classes: torch.Tensor, step: Step) -> None:
        """The surest of this batch and of those before it (of equals the first); equal on every rank. An image
        without an annotated positive is −∞ sure."""
        features, sure, classes = rows_of_all_ranks(step.world, features.float(), sure.float(), classes)
        if not len(sure):
            return
        highest = torch.full_like(self.surest_logit, -torch.inf).scatter_reduce(0, classes, sure, "amax")
        numbers = torch.arange(len(sure), device=sure.device)
        of_others = torch.full_like(classes, len(sure) - 1)
        first = torch.where(sure == highest[classes], numbers, of_others)
        winner = torch.full_like(highest, len(sure) - 1, dtype=torch.int64).scatter_reduce(0, classes, first, "amin")
        surer = highest > self.surest_logit
        self.surest_logit = torch.where(surer, highest, self.surest_logit)
        self.surest = torch.where(surer[:, None], features[winner], self.surest)

    def state(self) -> dict[str, torch.Tensor]:
        return {**super().state(), "surest": self.surest, "surest_logit": self.surest_logit,
                "correlation": self.correlation}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        own = ("surest", "surest_logit", "correlation")
        super().load_state({name: value for name, value in state.items() if name not in own})
        self.surest, self.surest_logit, self.correlation = (state[name] for name in own)


def estimated_correlation(state: SampleState | NoState, classes: int) -> torch.Tensor:
    """float32 [L, L]: r, from the estimates of all training samples as they were last written."""
    def products(shard: int, rows: np.ndarray, phi: np.ndarray) -> np.ndarray:
        estimates = torch.sigmoid(torch.from_numpy(phi).double()).numpy()
        return np.vstack([estimates.T @ estimates, estimates.sum(0)])

    sums = state.sum_rows(["phi"], (classes + 1, classes), products)
    return (sums[:-1] / sums[-1][:, None].clamp(min=1e-30)).fill_diagonal_(1.0).float()


def seen_cells(maps: torch.Tensor, classes: torch.Tensor, keep: float) -> torch.Tensor:
    """bool [B, G, G]: where each image's class is seen in maps [B, L, G, G]; at least one cell."""
    scores = maps[torch.arange(len(maps), device=maps.device), classes]
    low, high = scores.amin((1, 2), keepdim=True), scores.amax((1, 2), keepdim=True)
    return scores >= low + keep * (high - low)


def mean_over(features: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """[B, D]: mean of features [B, D, G, G] over each image's cells [B, G, G]."""
    inside = cells.flatten(1)[:, :, None].to(features.dtype)
    return (features.flatten(2) @ inside).squeeze(2) / inside.sum(1).clamp(min=1)
