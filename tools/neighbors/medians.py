"""Class medians ψ(c), elementwise over the vectors of all annotated positives of c, and the distances between them.

Exact and out of core: classes are put into groups whose vectors fit into memory together (a class that is too large for
that is cut into ranges of columns), and a worker collects one group in one pass over the shards that have any of it.
With `most`, about that many positives of a class are taken, chosen by a hash: the median is then that of a random
sample, whose rank is off by about 50/√most percent.
Legend: L classes, D feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.neighbors.searching import features_print, sample_numbers
from lacuna.tools.neighbors.vectors import VectorReader
from lacuna.tools.passes.parts import Parts, fingerprint_of

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Group:
    """What one worker collects at a time."""

    classes: tuple[int, ...]
    columns: tuple[int, int]  # first, end
    vectors: int


def plan_groups(counts: np.ndarray, width: int, budget: int) -> list[Group]:
    """Groups of classes (those with any positives) of at most `budget` bytes each."""
    groups: list[Group] = []
    classes: list[int] = []
    held = 0
    for cls in np.flatnonzero(counts).tolist():
        count = int(counts[cls])
        if classes and (held + count) * width * _FLOAT_BYTES > budget:
            groups.append(Group(tuple(classes), (0, width), held))
            classes, held = [], 0
        if count * width * _FLOAT_BYTES > budget:
            columns = max(1, budget // (count * _FLOAT_BYTES))
            groups += [Group((cls,), (first, min(first + columns, width)), count) for first in range(0, width, columns)]
        else:
            classes.append(cls)
            held += count
    return groups + ([Group(tuple(classes), (0, width), held)] if classes else [])


@dataclass(frozen=True)
class MedianJob:
    """Parts by group number: `medians` float32 [classes of the group, its columns]. `source` are features."""

    source: ShardSource
    counts: np.ndarray  # int64 [L] annotated positives of rows that take part
    groups: list[Group]
    memory: int
    most: int | None = None

    @property
    def fingerprint(self) -> str:
        subset = self.source.subset.fingerprint if self.source.subset else None
        return fingerprint_of(job="medians", features=features_print(self.source), subset=subset,
                              labels=self.source.sidecar.fingerprint, most=self.most,
                              groups=[[g.classes, g.columns] for g in self.groups])

    def build(self) -> Callable[[int], Mapping[str, np.ndarray]]:
        reader = VectorReader(self.source, self.memory)
        return lambda number: {"medians": self._medians(self.groups[number], reader)}

    def _medians(self, group: Group, reader: VectorReader) -> np.ndarray:
        found: dict[int, list[np.ndarray]] = {cls: [] for cls in group.classes}
        wanted = np.zeros(len(self.counts), bool)
        wanted[list(group.classes)] = True
        starts = sample_numbers(self.source)
        for shard in np.flatnonzero(self.source.counts).tolist():
            labels = self.source.sidecar.labels(shard)
            rows = np.repeat(np.arange(len(labels)), np.diff(labels.pos_ptr))
            rows, classes = rows[wanted[labels.pos_ids]], labels.pos_ids[wanted[labels.pos_ids]]
            if self.most is not None:
                kept = self._sampled(starts[shard] + rows, classes)
                rows, classes = rows[kept], classes[kept]
            if not len(rows):
                continue
            vectors = reader.shard(shard)
            place = np.full(len(labels), -1)
            place[vectors.rows] = np.arange(len(vectors.rows))
            for cls in np.unique(classes).tolist():
                places = place[rows[classes == cls]]
                found[cls].append(vectors.matrix[places[places >= 0], slice(*group.columns)])
        first, end = group.columns
        return np.stack([_median(found.pop(cls), end - first) for cls in group.classes])

    def _sampled(self, samples: np.ndarray, classes: np.ndarray) -> np.ndarray:
        assert self.most is not None
        return uniform_array(mix(0), samples * len(self.counts) + classes) < self.most / self.counts[classes]


def _median(parts: list[np.ndarray], width: int) -> np.ndarray:
    vectors = np.concatenate(parts) if parts else np.zeros((0, width), np.float32)
    return np.median(vectors, axis=0, overwrite_input=True) if len(vectors) else np.full(width, np.nan, np.float32)


def collect_medians(parts: Parts, groups: list[Group], classes: int, width: int) -> np.ndarray:
    """float32 [L, D]; NaN for classes without annotated positives."""
    medians = np.full((classes, width), np.nan, np.float32)
    for number, arrays in parts.read_all(list(range(len(groups)))):
        medians[list(groups[number].classes), slice(*groups[number].columns)] = arrays["medians"]
    return medians


def class_distances(medians: np.ndarray, distance: str) -> np.ndarray:
    """float32 [L, L], Euclidean or cosine; infinite where one of the two has no median."""
    defined = np.flatnonzero(np.isfinite(medians).all(axis=1))
    points = medians[defined].astype(np.float64)
    if distance == "cosine":
        lengths = np.linalg.norm(points, axis=1, keepdims=True)
        points /= np.where(lengths == 0, 1, lengths)
    out = np.full((len(medians), len(medians)), np.inf, np.float32)
    if len(defined):
        # By differences: a sum of squares minus a product would leave few digits of small distances.
        exactly = "donot_use_mm_for_euclid_dist"
        euclidean = torch.cdist(torch.from_numpy(points), torch.from_numpy(points), compute_mode=exactly).numpy()
        out[np.ix_(defined, defined)] = euclidean if distance == "euclidean" else euclidean**2 / 2
    return out
