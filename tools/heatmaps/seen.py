"""What a kept heatmap says about what the model saw, apart from the value it started with.

A map of SCL is a running mean that starts at 1 for an annotated class: after n looks at a cell, μⁿ of that 1 is still
in it, and a young map is high everywhere. Which crops a sample has had follows from the seed alone, so n is known for
every cell, and the start can be taken out: what is left comes from what was seen. Cells in no crop are known, too.
Legend: W heatmap side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.augment import Box, sample_rng
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.store import StateStore
from lacuna.state_store.sweep import Reader
from lacuna.state_store.topk import UNTRACKED
from lacuna.trainer.config.sections import Config
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import METHODS
from lacuna.trainer.methods.verelst import VerelstSettings
from lacuna.trainer.training_data import epoch_plan, train_augment


@dataclass(frozen=True)
class SeenMap:
    """One class of one sample."""

    values: np.ndarray  # float32 [W, W] of [0, 1]: the part of the running mean that comes from what the model saw
    unseen: np.ndarray  # bool [W, W]: cells of which it has seen nothing
    start_share: float = 0.0  # how much of the kept map is still the value that it started with

    @property
    def peak(self) -> float:
        return float(self.values.max(initial=0.0, where=~self.unseen))

    @classmethod
    def plain(cls, values: np.ndarray) -> SeenMap:
        """Without a start: what a model says now, or a map whose start is not known."""
        return cls(values.astype(np.float32), np.zeros(values.shape, bool))


def keeps_heatmaps(store: StateStore) -> bool:
    return "heat" in store.schema.fields or "heat_values" in store.schema.fields


def maps_of(reader: Reader, shard: int, rows: list[int]) -> list[dict[int, np.ndarray]]:
    """For each row, class id → heatmap uint8 [W, W] as kept; never-visited top-k samples have none."""
    if "heat" in reader.schema.fields:
        return [dict(enumerate(maps)) for maps in reader.read_shard("heat", shard)[rows]]
    ids, values = reader.read_shard("heat_ids", shard)[rows], reader.read_shard("heat_values", shard)[rows]
    return [{int(i): value for i, value in zip(*pair, strict=True) if i != UNTRACKED}
            for pair in zip(ids, values, strict=True)]


@dataclass(frozen=True)
class Looks:
    """Which crops the samples of a run have had."""

    config: Config
    source: ShardSource

    @cached_property
    def _ends(self) -> list[tuple[int, int, int]]:
        """(step at which it ended, phase, epoch) of every epoch that the config plans."""
        ends, step = [], 0
        for phase, section in enumerate(self.config.phases):
            for epoch in range(section.epochs):
                step += epoch_plan(self.config, self.source, phase, epoch).steps
                ends.append((step, phase, epoch))
        return ends

    @cached_property
    def _momentum(self) -> float | None:
        kind = METHODS.get(self.config.method["name"])  # a method registered elsewhere is not here to say
        settings = validated(kind.settings_type, self.config.method, "method") if kind else None
        return settings.momentum if isinstance(settings, VerelstSettings) else None

    def boxes(self, shard: int, row: int, image: torch.Tensor, step: int) -> Iterator[Box]:
        """Of the epochs that had ended at a step; whether the one that was under way had come to a sample is not
        asked."""
        augment = train_augment(self.config.data)
        for end, phase, epoch in self._ends:
            if end > step:
                return
            rng = sample_rng(mix(self.config.seed, phase), epoch, shard, row)
            yield augment.box(image.shape[-2], image.shape[-1], rng)

    def counts(self, shard: int, row: int, image: torch.Tensor, step: int, side: int) -> np.ndarray:
        """int64 [W, W]: how often the model had seen each cell."""
        cells = (np.arange(side) + 0.5) / side
        found = np.zeros((side, side), np.int64)
        for x0, y0, x1, y1 in self.boxes(shard, row, image, step):
            found += np.outer((cells >= y0) & (cells <= y1), (cells >= x0) & (cells <= x1))
        return found

    def seen(self, maps: dict[int, np.ndarray], reader: Reader, shard: int, row: int, image: torch.Tensor,
             step: int) -> dict[int, SeenMap]:
        """The sample's kept maps (maps_of) with their start taken out; image: uint8 [3, H, W]."""
        momentum = self._momentum
        if "heat" not in reader.schema.fields or momentum is None or not maps or not step:
            # A top-k map starts at the class's running score of that moment, which nobody keeps; and a snapshot that a
            # person named does not say its step.
            return {cls: SeenMap.plain(kept / np.float32(255)) for cls, kept in maps.items()}
        counts = self.counts(shard, row, image, step, len(next(iter(maps.values()))))
        known = {int(c) for c in self.source.sidecar.labels(shard).positives(row)}
        return {cls: without_start(kept, float(cls in known), counts, momentum) for cls, kept in maps.items()}


def without_start(kept: np.ndarray, start: float, counts: np.ndarray, momentum: float) -> SeenMap:
    """kept = μⁿ·start + what was seen."""
    left = start * np.float64(momentum) ** counts
    values = np.clip(kept / 255 - left, 0, 1)
    return SeenMap(np.where(counts > 0, values, 0).astype(np.float32), counts == 0, float(left.mean()))
