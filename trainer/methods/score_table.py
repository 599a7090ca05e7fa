"""Imported tables of scores as fields of a method: read from their own store, never copied into the run's.

`lacuna import-scores` makes the store. A method that names `tables` gets a field of each, whose initial
rows are the table's; as training never writes them, they cost the run's store nothing.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from pydantic import Field as Setting

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.state_store import Field, Given
from lacuna.state_store.store import SnapshotReader
from lacuna.trainer.methods.base import Method, Needs, Settings, unknown


class ScoreSettings(Settings):
    scores: str = ""
    """URL of the imported tables (`lacuna import-scores`); required."""


TableSettings = TypeVar("TableSettings", bound=ScoreSettings)


class TableMethod(Method[TableSettings]):
    """Base of methods that read imported tables."""

    tables: tuple[str, ...] = ("scores",)

    def needs(self) -> Needs:
        return Needs(scores=self.tables)

    def fields(self) -> list[Field]:
        url = self.settings.scores
        if not url:  # only asked what it would keep
            return [Field(name, (self.task.classes,), "float16", Given("table")) for name in self.tables]
        return [self._imported.field(name) for name in self.tables]

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        return self._imported.reader.read_shard(field, shard)

    @cached_property
    def _imported(self) -> ImportedScores:
        return ImportedScores(self.settings.scores, self.task.data["shard index"], self.tables, "method.scores",
                              "data.train")


class ImportedScores:
    """A store that `lacuna scores` or `lacuna import-scores` made, checked against the shards it is read for."""

    def __init__(self, url: str, index: str, names: tuple[str, ...], setting: str, data: str):
        """`index`: fingerprint of the shards' index. `setting` has named the store, `data` the shards."""
        store = state_store.open(url)
        snapshots = store.snapshots()
        if not snapshots:
            raise UserError(f"{setting} = {url!r}: no table was imported. Run `lacuna import-scores` with "
                            "this --out.")
        lacking = [name for name in names if name not in store.schema.fields]
        if lacking:
            raise UserError(f"{setting} = {url!r} lacks the tables {lacking}; it has "
                            f"{sorted(store.schema.fields)}. Import all: `lacuna import-scores NAME=TABLE …`.")
        made_for = store.schema.fingerprint.partition("-")[0]
        if made_for != index:
            raise UserError(f"{setting} = {url!r} was imported for the shard index {made_for}, {data} has "
                            f"{index}. Import the tables for these shards (`lacuna import-scores`).")
        self.entry, self.reader = snapshots[-1], SnapshotReader(store, store.manifest(snapshots[-1].name).refs)

    def field(self, name: str) -> Field:
        """Another table is another field: a run's store does not go on with it."""
        spec = self.reader.schema.fields[name]
        return Field(name, spec.shape, spec.dtype, Given(f"table {self.entry.sha256[:16]}"))


class PseudoPositiveSettings(ScoreSettings):
    threshold: float = Setting(0.3, ge=0)
    """Least score of a pseudo-positive."""
    top_k: int = Setting(0, ge=0)
    """Only the k highest scores of an image can be pseudo-positives; 0 = no limit."""


def pseudo_positives(scores: torch.Tensor, labels: torch.Tensor, threshold: float, top_k: int,
                     inclusive: bool = True) -> torch.Tensor:
    """bool [B, L]: unknown entries whose score reaches (or exceeds) the threshold, among the k highest."""
    chosen = unknown(labels) & ((scores >= threshold) if inclusive else (scores > threshold))
    if 0 < top_k < scores.shape[1]:
        least = scores.topk(top_k, dim=1).indices
        chosen &= torch.zeros_like(chosen).scatter_(1, least, True)
    return chosen
