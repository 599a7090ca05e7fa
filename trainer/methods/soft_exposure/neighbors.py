"""SE-L, SE-I and SE: unknown entries are soft labels, by their distance to annotated classes and neighbouring images.

d⁺(u) is the distance of an unknown class u to the image's nearest annotated positive (between class medians), or to
the nearest neighbouring image that has u as a positive; d⁻(u) likewise for negatives. The nearer side is the label:
    T = +exp(β(1 − d⁺)) + γ if d⁺ < d⁻, else −exp(β(1 − d⁻)) + γ, distances divided by the image's largest.
A class far from everything annotated is thus a hard label, a near one a soft one. The paper's text says the reverse,
its formula and its rebuttal this; `invert` takes the text's side. Loss and reduction: soft_exposure.py.

Temperatures are computed for every batch from the [L, L] distances and a few stored neighbours; nothing is [N, L].
Legend: B batch rows, L classes, P annotated classes of an image, k neighbours, M classes that they annotate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field as StateField
from lacuna.trainer.methods.base import Needs, Step, Task, negative, positive, unknown
from lacuna.trainer.methods.known_gradient import numbers
from lacuna.trainer.methods.soft_exposure.baselines import ExposureSettings, NoExposure
from lacuna.trainer.neighbors import Neighborhood
from lacuna.trainer.on_device.uploads import to_device

_MEDIAN_OF = 5
_UNSAID = 1.0  # image distance of a class that no neighbour annotates
_UNDEFINED = 4.0  # more than any distance between vectors of length ≤ 1
_GPU_ENTRIES = 1 << 26  # of the largest array there
_USUAL = (10, 100)  # k and M of an OpenImages-like dataset: what `lacuna methods` tells the size of the state from


class SoftExposureSettings(ExposureSettings):
    neighbors: str | None = None
    """Folder or URL that `lacuna neighbors` made for the training data; needed."""
    beta: float = Field(5.0, gt=0)
    """β: temperatures reach from 1 to exp(β)."""
    gamma: float = Field(0.0, ge=0, lt=1)
    """γ, added to every temperature: softens positives, hardens negatives."""
    invert: bool = False
    """|T| = exp(β·d) instead of exp(β(1 − d)): near labels are the hard ones, as the paper's text has it."""
    normalize: Literal["joint", "separate"] = "joint"
    """Divide an image's distances by the largest of d⁺ and d⁻ together, or those of each side by their own largest."""
    side: Literal["nearer", "negative"] = "nearer"
    """nearer: the label is that of the nearer side (the paper). negative: every soft label is a negative, softer if it
    is near a positive; with one or two annotations an image, the nearer side is hardly better than a coin."""
    nearest: Literal["min", "median"] = "min"
    """Of several annotated classes or neighbours: the smallest distance, or the median of the five smallest (found 0.7
    points better by the authors, between labels)."""


class SoftExposure(NoExposure):
    """SE: the smaller of label and image distance. Where labels say nothing and no neighbour annotates a class, its
    distance is 1."""

    settings_type = SoftExposureSettings
    settings: SoftExposureSettings
    by_label, by_image = True, True

    def __init__(self, settings: SoftExposureSettings, task: Task):
        super().__init__(settings, task)
        self.near: Neighborhood | None = None
        self.distances = torch.zeros(0)  # [L + 1, L]; the last row is infinite and stands for "no class"
        if settings.neighbors is not None:
            self.near = Neighborhood.open(settings.neighbors)
            self.near.check(task.classes, task.data)
            if self.by_label:
                self.distances = torch.nn.functional.pad(torch.from_numpy(self.near.class_distances()), (0, 0, 0, 1),
                                                         value=torch.inf)

    def needs(self) -> Needs:
        return Needs(neighbors=True)

    def fields(self) -> list[StateField]:
        if not self.by_image:
            return []
        return (self.near or Neighborhood("", *_USUAL, self.task.classes, "", {}, "")).fields()

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        assert self.near is not None, "build_method refuses to train without `neighbors`"
        return self.near.rows(field, shard)

    def state(self) -> dict[str, torch.Tensor]:
        """A fingerprint in place of the distances: at 9,600 classes they would add 370 MB to every checkpoint."""
        text = self.near.fingerprint if self.near else ""
        return {"neighbors": torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        if not torch.equal(state["neighbors"].cpu(), self.state()["neighbors"]):
            raise UserError(f"method.neighbors = {self.settings.neighbors!r}: not the neighbours that this run began "
                            "with. Restore them, or start another run (name=…).")

    def exposure(self, batch: Batch, step: Step) -> Callable[[slice, torch.Tensor], None]:
        self.distances = to_device(self.distances, batch.labels.device)
        known = _Annotated(self.distances, batch.host_labels, self.settings.nearest) if self.by_label else None
        near = _near_classes(step, batch, self.settings.nearest) if self.by_image else None

        def fill(rows: slice, out: torch.Tensor) -> None:
            unknowns = numbers(unknown(batch.labels[rows]), self.distances)
            out.copy_(self._sharpness(rows, unknowns, known, near))

        return fill

    def _sharpness(self, rows: slice, unknowns: torch.Tensor, known: _Annotated | None,
                   near: _Near | None) -> torch.Tensor:
        if known is None:
            assert near is not None
            ids, said, plus, minus = near.rows(rows)
            few = sharpness(plus, minus, unknowns.gather(1, ids).mul_(said), self.settings)
            return torch.zeros_like(unknowns).scatter_(1, ids, few)
        plus, minus = known.distances(rows)
        if near is None:
            # Undefined distances are infinite; any finite number in their place, because 0 · inf is NaN.
            said = (plus if self.settings.side == "negative" else torch.maximum(plus, minus)) < _UNDEFINED
            return sharpness(plus.clamp_(max=_UNDEFINED), minus.clamp_(max=_UNDEFINED),
                             unknowns.mul_(numbers(said, unknowns)), self.settings)
        ids, _, near_plus, near_minus = near.rows(rows)
        for side, of_images in ((plus, near_plus), (minus, near_minus)):
            nearer = torch.minimum(side.gather(1, ids), of_images)
            side.clamp_(max=_UNSAID).scatter_(1, ids, nearer)
        return sharpness(plus, minus, unknowns, self.settings)


class SoftExposureByLabels(SoftExposure):
    """SE-L: label distances only. An image without annotated positives, or without negatives, has no soft labels
    (with side: negative, it needs positives only)."""

    by_image = False


class SoftExposureByImages(SoftExposure):
    """SE-I: image distances only. Classes that no neighbour annotates are ignored."""

    by_label = False


def sharpness(plus: torch.Tensor, minus: torch.Tensor, eligible: torch.Tensor,
              settings: SoftExposureSettings) -> torch.Tensor:
    """1/T from d⁺ and d⁻ (which are overwritten) of the entries that are eligible (1, else 0); 0 for the others."""
    if settings.side == "negative":
        minus = plus.clone()  # equal distances are negatives
    plus.mul_(eligible)
    minus.mul_(eligible)
    tops = [side.amax(1, keepdim=True) for side in (plus, minus)]
    if settings.normalize == "joint":
        tops = [torch.maximum(*tops)] * 2
    for side, top in zip((plus, minus), tops, strict=True):
        side.div_(torch.where(top == 0, 1.0, top))  # where all distances are 0, nothing is to be divided
    nearer = torch.minimum(plus, minus)
    out = torch.exp_(nearer.mul_(-settings.beta) if settings.invert else nearer.mul_(settings.beta).sub_(settings.beta))
    out = torch.copysign(out, plus.sub_(minus)).neg_()  # of equal distances the difference is +0: a negative
    if settings.gamma:
        out.div_(1 + settings.gamma * out)  # 1/(T + γ)
    return out.mul_(eligible)


class _Annotated:
    """Distances of all classes to the annotated ones of each image of a batch."""

    def __init__(self, between: torch.Tensor, labels: torch.Tensor, how: str):
        """`labels` on the host: their numbers are shapes."""
        self.between, self.how = between, how
        found = [padded_ids(side(labels)) for side in (positive, negative)]
        self.ids = [(to_device(ids, between.device), counts) for ids, counts in found]

    def distances(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """d⁺ and d⁻, each [rows, L]; infinite where there is nothing annotated or a class has no median."""
        plus, minus = (self._side(ids[rows], counts[rows]) for ids, counts in self.ids)
        return plus, minus

    def _side(self, ids: torch.Tensor, counts: list[int]) -> torch.Tensor:
        classes = self.between.shape[1]
        out = self.between.new_empty(len(ids), classes)
        step = max(1, _GPU_ENTRIES // (ids.shape[1] * classes)) if ids.is_cuda else 1
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            few = ids[part, : max([1, *counts[part]])]
            picked = self.between.index_select(0, few.reshape(-1)).view(*few.shape, classes)
            out[part] = nearest(picked, 1, self.how)
        return out


@dataclass(frozen=True)
class _Near:
    """What the neighbours of each image of a batch annotate."""

    ids: torch.Tensor  # int64 [B, M] classes; where there are fewer, the first again, or 0
    said: torch.Tensor  # [B, M] 1, or 0 where there is none
    plus: torch.Tensor  # [B, M] d⁺, 1 if no neighbour has it as a positive
    minus: torch.Tensor  # [B, M] d⁻

    def rows(self, rows: slice) -> tuple[torch.Tensor, ...]:
        return self.ids[rows], self.said[rows], self.plus[rows], self.minus[rows]


def _near_classes(step: Step, batch: Batch, how: str) -> _Near:
    if not len(batch):
        none = torch.zeros(0, 1, device=batch.labels.device)
        return _Near(none.long(), none, none, none)
    distances = step.state.read("neighbor_distances")[:, None, :]
    places = torch.arange(distances.shape[2], device=distances.device)
    ids = step.state.read("near_classes").long()
    empty, sides, said = ids < 0, [], torch.zeros_like(ids, dtype=torch.bool)
    for name in ("near_positive", "near_negative"):
        bits = step.state.read(name)
        # An empty place repeats the first one, so that writing to its class changes nothing.
        bits = torch.where(empty, bits[:, :1], bits)
        said |= bits != 0
        has = (bits[:, :, None] >> places & 1).bool()
        side = nearest(torch.where(has, distances, torch.inf), 2, how)
        sides.append(torch.where(side.isfinite(), side, _UNSAID))
    ids = torch.where(empty, ids[:, :1], ids).clamp_(min=0)
    return _Near(ids, numbers(said, distances), *sides)


def nearest(distances: torch.Tensor, dim: int, how: str) -> torch.Tensor:
    """The smallest along `dim`, or the median of the five smallest finite ones; infinite if there are none."""
    if how == "min":
        return distances.amin(dim)
    few: list[torch.Tensor] = []  # smallest first, by insertion: forty times faster than `topk` along a short dimension
    for value in distances.unbind(dim):
        for place, held in enumerate(few):
            few[place], value = torch.minimum(held, value), torch.maximum(held, value)
        if len(few) < _MEDIAN_OF:
            few.append(value)
    found = torch.stack(few)
    count = torch.isfinite(found).sum(0, keepdim=True)
    return ((found.gather(0, (count - 1).clamp_(min=0) // 2) + found.gather(0, count // 2)) / 2)[0]


def padded_ids(chosen: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Numbers of the true columns of bool [B, L] as int64 [B, P], padded with L, and how many there are in each row."""
    rows, columns = chosen.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(chosen))
    starts = counts.cumsum(0) - counts
    out = rows.new_full((len(chosen), max([1, *(listed := counts.tolist())])), chosen.shape[1])
    out[rows, torch.arange(len(rows), device=rows.device) - starts[rows]] = columns
    return out, listed
