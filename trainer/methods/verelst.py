"""EN, EP and consistency (CL, SCL) of Verelst et al. (WACV 2023): a supervision term and a consistency term, composed.

Reduction: mean over classes (and cells), mean over the global batch. Exact logarithms.
State: `score`, the running average of the image's probabilities (for EN's ranking and CL); for SCL `heat`, running
heatmaps on a W = 2G grid of the uncropped image, of all classes or of the top k.
Before `start_phase` (the linear warm-up) the loss is AN, and the running averages are kept up.
Readings where the paper is silent: the L1 distance is a mean; an annotated positive is never treated as negative.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field as Setting

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.state_store import Field, Given
from lacuna.state_store.cutoffs import Cutoffs
from lacuna.trainer.heatmaps import read_crop, write_crop
from lacuna.trainer.methods.base import (
    EpochStart,
    LossTerms,
    Masked,
    Method,
    Needs,
    Outputs,
    Settings,
    Step,
    Task,
    expected_positives,
    negative,
    positive,
)
from lacuna.trainer.methods.cardinality import Cardinalities, matched
from lacuna.trainer.methods.cole import expected_positives_penalty
from lacuna.trainer.methods.cutoff_state import CUTOFF_STATE, from_tensors, to_tensors

_PAPER = ("Verelst et al., Spatial Consistency Loss for Training Multi-Label Classifiers from Single-Label "
          "Annotations, WACV 2023")
class VerelstSettings(Settings):
    momentum: float = Setting(0.8, ge=0, le=1)
    """μ of the running averages."""
    gamma: float = Setting(1.0, ge=0)
    """Weight of the consistency term (the paper searches 0.1 and 1)."""
    distance: str = Setting("l1", pattern="^(l1|l2|jsd)$")
    """Between prediction and running average: l1 (paper), l2 or jsd."""
    start_phase: int = Setting(0, ge=0)
    """Phase (from 0) in which EN and consistency begin; before it the loss is AN."""
    score_dtype: str = Setting("uint8", pattern="^(uint8|uint16)$")
    """uint8 is rounded stochastically; uint16 when small probabilities matter."""
    cardinality: tuple[float, ...] = ()
    """Ours, for EN and EP: shares of images with 1, 2, 3, … positives. Every image then gets a number of expected
    positives of its own instead of every class (cardinality.py); empty = as published."""
    top_k: int = Setting(0, ge=0)
    """SCL: heatmaps of the k top-scoring classes of each image (ImageNet: 10); 0 keeps those of all classes."""


class Verelst(Method[VerelstSettings]):
    """Subclasses name the two terms."""

    paper = _PAPER
    supervision = "en"  # an, en, ep or epr
    consistency = ""  # cl, scl or none

    def __init__(self, settings: VerelstSettings, task: Task):
        super().__init__(settings, task)
        self.s, self.cutoffs, self.cardinalities = settings, None, None
        if any(share < 0 for share in settings.cardinality) or (settings.cardinality and not sum(settings.cardinality)):
            raise UserError(f"method.cardinality = {list(settings.cardinality)}: give the shares of images with 1, 2, "
                            "3, … positives, none negative and not all 0.")
        needs_k = self.supervision != "an" and not settings.cardinality
        self.k = expected_positives(task) if needs_k else 0.0
        annotated = task.positives.sum() / max(1, task.samples)
        self.ratio = self.k / max(annotated, 1e-9)  # the paper's K: true positives per annotated one
        if self.consistency == "scl" and not task.grid:
            raise UserError("SCL needs images (score maps); feature shards have none. Use the CL variant.")
        if settings.top_k > task.classes:
            raise UserError(f"method.top_k = {settings.top_k}, but there are {task.classes} classes.")

    cutoffs: Cutoffs | None
    cardinalities: Cardinalities | None

    def needs(self) -> Needs:
        return Needs(maps=self.consistency == "scl", whole_batch=self.supervision == "epr")

    @property
    def quotas(self) -> np.ndarray:
        """p_i = round(K · n_i), at least the annotated positives, at most what is not a verified negative."""
        wanted = np.rint(self.ratio * self.task.positives).astype(np.int64)
        return np.clip(wanted, self.task.positives, self.task.samples - self.task.negatives)

    # ---- state

    def fields(self) -> list[Field]:
        classes, side, k = self.task.classes, 2 * self.task.grid, self.s.top_k
        found = [Field("score", (classes,), self.s.score_dtype, Given("positives"), (0.0, 1.0),
                       stochastic=self.s.score_dtype == "uint8", histogram=True)]
        if self.consistency == "scl" and not k:
            found.append(Field("heat", (classes, side, side), "uint8", Given("positives"), (0.0, 1.0), stochastic=True))
        elif self.consistency == "scl":
            found += topk_heat_fields(k, classes, side)
        return found

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        start = (labels == POSITIVE).astype(np.float32)
        if field == "score":
            return start
        side = 2 * self.task.grid
        return np.broadcast_to(start[:, :, None, None], (*start.shape, side, side))

    def initial_counts(self) -> dict[str, np.ndarray]:
        """Annotated positives start at 1, unknown entries at 0, verified negatives are outside the ranking."""
        counts = np.zeros((self.task.classes, 256), dtype=np.int64)
        counts[:, 255] = self.task.positives
        counts[:, 0] = self.task.samples - self.task.positives - self.task.negatives
        return {"score": counts}

    def begin_epoch(self, start: EpochStart) -> None:
        # Until one whole epoch of running averages exists, the expected positives are the annotated ones.
        needed = self.supervision in ("en", "ep") and start.phase >= self.s.start_phase and start.overall > 0
        self.cutoffs = self.cardinalities = None
        if needed and self.s.cardinality:
            self.cardinalities = matched(start, "score", self.s.cardinality)
        elif needed:
            self.cutoffs = start.state.cutoffs("score", self.quotas, start.overall)

    def state(self) -> dict[str, torch.Tensor]:
        if self.cardinalities is None:
            return to_tensors(self.cutoffs)
        return {"cardinalities": torch.from_numpy(self.cardinalities.bounds),
                "rows": torch.tensor([self.cardinalities.max_rows])}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.cutoffs = self.cardinalities = None
        if "cardinalities" in state:
            self.cardinalities = Cardinalities(state["cardinalities"].numpy(), int(state["rows"]))
        else:
            self.cutoffs = from_tensors(state)

    # ---- loss

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        started = step.phase >= self.s.start_phase
        before = step.state.read("score")
        p = torch.sigmoid(outputs.logits)
        terms = self._supervise(outputs.logits, batch.labels, step, started)
        terms.rows["score"] = self._average(before, p.detach())
        if self.consistency == "cl" and started:
            terms.per_sample = terms.per_sample + self.s.gamma * _distance(p, before, self.s.distance).mean(1)
        if self.consistency == "scl":
            self._spatial(terms, outputs, batch, step, before, started)
        return terms

    def _supervise(self, logits: torch.Tensor, labels: torch.Tensor, step: Step, started: bool) -> LossTerms:
        kind = self.supervision if started else "an"
        is_positive = positive(labels)
        as_positive, as_negative = -F.logsigmoid(logits), -F.logsigmoid(-logits)
        if kind == "epr":
            penalty = expected_positives_penalty(torch.sigmoid(logits), self.k, step)
            return LossTerms(torch.where(is_positive, as_positive, 0.0).mean(1), penalty)
        expected = is_positive
        if kind != "an" and self.cutoffs is not None:
            # A verified negative is outside the ranking.
            expected = is_positive | (step.state.selected("score", self.cutoffs) & ~negative(labels))
        if kind in ("en", "ep") and self.cardinalities is not None:
            expected = self.cardinalities.expected(step.state, "score", labels)
        taken = expected if kind == "ep" else is_positive
        entries = torch.where(taken, as_positive, torch.where(expected, 0.0, as_negative))
        return LossTerms(entries.mean(1))

    def _average(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return self.s.momentum * old + (1 - self.s.momentum) * new

    def _spatial(self, terms: LossTerms, outputs: Outputs, batch: Batch, step: Step, score: torch.Tensor,
                 started: bool) -> None:
        """SCL: the loss sees the heatmaps as they were before this visit; only cells inside the crop are written."""
        if self.s.top_k and not started:
            return  # which classes are tracked is chosen after the warm-up
        scores, name, heat = torch.sigmoid(outputs.maps), "heat", None
        if self.s.top_k:
            ids, fresh = tracked_classes(step, score, batch.labels, self.s.top_k)
            terms.rows["heat_ids"] = ids
            scores, name = torch.gather(scores, 1, _spread(ids, scores)), "heat_values"
            # A new map starts constant at the class's running score.
            start = torch.gather(score, 1, ids)[:, :, None, None]
            heat = torch.where(fresh[:, None, None, None], start, step.state.read(name))
        else:
            heat = step.state.read(name)
        if started:
            target = read_crop(heat, batch.boxes, batch.flips, scores.shape[-1])
            distance = _distance(scores, target, self.s.distance)
            terms.per_sample = terms.per_sample + self.s.gamma * distance.mean((1, 2, 3))
        values, seen = write_crop(scores.detach(), batch.boxes, batch.flips, heat.shape[-1])
        new = torch.where(seen, self._average(heat, values), heat)
        if self.s.top_k:
            seen = seen | fresh[:, None, None, None]
        terms.rows[name] = Masked(new, seen)


def topk_heat_fields(k: int, classes: int, side: int) -> list[Field]:
    from lacuna.state_store.topk import topk_fields

    return list(topk_fields("heat", k, classes, "uint8", (side, side), range=(0.0, 1.0), stochastic=True))


def tracked_classes(step: Step, score: torch.Tensor, labels: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [B, k], fresh bool [B]): frozen once chosen; first the annotated classes, then by running score."""
    ids = step.state.read("heat_ids").long()
    fresh = ids[:, 0] < 0
    chosen = torch.topk(score + positive(labels).to(score.dtype) * 2, k, dim=1).indices
    return torch.where(fresh[:, None], chosen, ids), fresh


def _spread(ids: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    return ids[:, :, None, None].expand(-1, -1, *maps.shape[2:])


def _distance(p: torch.Tensor, target: torch.Tensor, kind: str) -> torch.Tensor:
    """Element-wise; the target is a constant."""
    if kind == "l1":
        return (p - target).abs()
    if kind == "l2":
        return (p - target) ** 2
    middle = (p + target) / 2
    return (_binary_kl(p, middle) + _binary_kl(target, middle)) / 2


def _binary_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    tiny = 1e-6  # p log p → 0 at both ends
    p, q = p.clamp(tiny, 1 - tiny), q.clamp(tiny, 1 - tiny)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def compose(supervision: str, consistency: str) -> type[Verelst]:
    """The class of one row of the paper's ablation table."""
    name = f"{supervision}_{consistency}".rstrip("_")
    body = {"supervision": supervision, "consistency": consistency,
            "class_state": CUTOFF_STATE if supervision in ("en", "ep") else {}}
    return type(f"Verelst_{name}", (Verelst,), body)
