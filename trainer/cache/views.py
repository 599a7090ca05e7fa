"""One look at every sample of a dataset, and where what the fixed part makes of it is kept.

The address names everything that the numbers depend on: the samples, the fixed weights and where they are cut off, how
an image becomes an input. So runs share what they have in common, and a cache of other weights is never mixed in.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass

import numpy as np

from lacuna.basics import storage
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.derived import DerivedRows
from lacuna.state_store.schema import Schema
from lacuna.trainer.config.sections import Config

FACTS = "facts.json"
_VERSION = 1  # of how rows are laid out and computed


@dataclass(frozen=True)
class Fixed:
    """The fixed part of a classifier, by name and by what it gives for one image."""

    cut: str
    weights: str  # hash
    shape: tuple[int, ...]

    def row(self, strong: bool) -> np.dtype:
        """How a sample is stored; the first byte says that it is."""
        kept: list[tuple] = [("kept", "<f2", self.shape), *([("strong", "<f2", self.shape)] if strong else [])]
        return np.dtype([("filled", "u1"), ("flip", "u1"), ("unused", "u2"), ("box", "<f4", (4,)), *kept])


@dataclass(frozen=True)
class View:
    source: ShardSource
    maker: SampleMaker
    row: np.dtype
    facts: dict
    url: str

    @classmethod
    def of(cls, config: Config, fixed: Fixed, source: ShardSource, maker: SampleMaker, number: int | None,
           seed: int) -> View:
        """`number` None: the view of evaluation."""
        assert maker.augment is not None
        drawn = number is not None or maker.strong is not None
        row = fixed.row(maker.strong is not None)
        facts = {
            "version": _VERSION, "backbone": config.model.backbone, "weights": fixed.weights, "cut": fixed.cut,
            "shape": list(fixed.shape), "image_size": config.data.image_size, "normalize": config.data.normalize,
            "precision": config.train.precision, "index": source.index.fingerprint, "keys": _keys(source.index),
            "augment": asdict(maker.augment), "strong": asdict(maker.strong) if maker.strong else None,
            "view": number, "seed": seed if drawn else None,
        }
        address = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        return cls(source, maker, row, facts, storage.join(cache_url(config), address))

    @property
    def schema(self) -> Schema:
        return DerivedRows.schema_of(self.source.index.counts, self.row.itemsize)

    @property
    def bytes(self) -> int:
        """When every sample that takes part is there: shards are stored whole."""
        return int(np.count_nonzero(self.source.counts)) * self.schema.shard_bytes

    def note(self) -> None:
        """Say what is kept here, and that it is in use, for `lacuna cache --list` and --prune."""
        index = self.source.index
        body = {**self.facts, "used": time.time(), "data": index.url, "counts": index.counts.tolist(),
                "row_bytes": self.row.itemsize}
        storage.write_atomic(storage.join(self.url, FACTS), json.dumps(body).encode(), durable=False)


def cache_url(config: Config) -> str:
    return config.train.cache_url or storage.join(config.run_folder, ".cache")


def _keys(index: ShardIndex) -> list[str]:
    """Shards of small images may agree in every size, and then two sets have one index fingerprint: keys tell them
    apart."""
    return [hashlib.sha256(index.members(shard).to_bytes()).hexdigest()[:16] for shard in
            sorted({0, len(index.shards) - 1})]
