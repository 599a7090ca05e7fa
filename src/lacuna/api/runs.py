"""Runs as training left them, on a disk or on object storage, also while they go on.

Legend: n samples, L classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from lacuna.api.state import StateReader
from lacuna.api.tables import Rows, pandas_module
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.datasets import open_dataset, training_set
from lacuna.tools.passes.trained import class_list, finished_checkpoints, open_trained, read_weights
from lacuna.tools.report.beliefs import belief_field, state_view
from lacuna.tools.report.recorded_run import RecordedRun
from lacuna.trainer.config.sections import Config
from lacuna.trainer.first_rows import first_rows

if TYPE_CHECKING:
    import pandas

    from lacuna.api.training import Results

__all__ = ["RunReader", "Scores", "open_run"]


@dataclass(frozen=True)
class Scores:
    """Probabilities of every class for n samples, with the samples' names and places."""

    scores: np.ndarray  # float32 [n, L]
    labels: np.ndarray  # int8 [n, L]: 1 positive, 0 negative, -1 unknown
    keys: list[str]
    shards: np.ndarray  # int64 [n]
    rows: np.ndarray  # int64 [n]
    classes: list[str]
    origin: str
    """Which snapshot or checkpoint says so."""

    def __len__(self) -> int:
        return len(self.scores)

    def frame(self) -> pandas.DataFrame:
        """One line per sample, indexed by its key; `shard`, `row`, and one column per class."""
        pd = pandas_module()
        table = pd.DataFrame(self.scores, pd.Index(self.keys, name="key"), self.classes)
        table.insert(0, "shard", self.shards)
        table.insert(1, "row", self.rows)
        return table


class RunReader:
    """One run folder; everything is read when it is asked for, and `metrics` and `results` afresh every time."""

    def __init__(self, url: str):
        self._recorded = RecordedRun.open(url)

    @property
    def url(self) -> str:
        return self._recorded.path

    @property
    def name(self) -> str:
        return self._recorded.name

    @property
    def config(self) -> Config:
        """The resolved config that the run was started with."""
        return self._recorded.config

    @property
    def metrics(self) -> Rows:
        """Every line of metrics.jsonl, oldest first: `kind`, `step`, and numbers. `.frame()` gives a DataFrame."""
        return Rows(RecordedRun.open(self.url).lines)

    @property
    def results(self) -> Results | None:
        """What `lacuna.train` returned at the end; None as long as the run has not come to it."""
        from lacuna.api.training import Results  # it builds on this module

        found = RecordedRun.open(self.url).results
        return Results.of(self.url, found) if found else None

    @cached_property
    def classes(self) -> list[str]:
        """Names of the model's outputs, in order."""
        return class_list(self.url, self.config)[0]

    def class_results(self, split: str = "test") -> Rows:
        """Per class of the `test` or `val` set: name, id, positives, and AP in 0..1 (None without positives)."""
        return Rows([{"name": name, **facts} for name, facts in self._recorded.class_rows(split).items()])

    @property
    def checkpoints(self) -> list[str]:
        """Names of the finished checkpoints that are kept, oldest first."""
        return [url.rsplit("/", 1)[-1] for url in finished_checkpoints(self.url)]

    def checkpoint(self, name: str | None = None) -> dict[str, torch.Tensor]:
        """The weights of a checkpoint, checked against their hash; default: the best epoch's, averaged if they were.

            weights = run.checkpoint()
            model.load_state_dict(weights)
        """
        return read_weights(open_trained(self._checkpoint(name)))

    def _checkpoint(self, name: str | None) -> str:
        if name is None:
            return self.url
        if name not in self.checkpoints:
            raise UserError(f"{self.url}: no finished checkpoint {name!r}; there are {self.checkpoints or 'none'}.")
        return storage.join(self.url, "checkpoints", name)

    def state(self, snapshot: str | None = None) -> StateReader:
        """What the run remembers about every training sample, at a snapshot (default: the newest)."""
        store = self._recorded.store
        if store is None:
            raise UserError(f"{self.url}: the method {self.config.method['name']!r} keeps no per-sample state.")
        return StateReader(store, snapshot, first_rows(self.config, store.schema.fields), self.classes)

    def beliefs(self, snapshot: str | None = None, shards: Sequence[int] | None = None) -> Scores:
        """What the run believes about the labels of its training samples: probabilities that its state remembers.

            beliefs = run.beliefs()
            unknown = beliefs.labels == -1
            beliefs.scores[unknown]          # what it thinks of labels that nobody gave

        Running scores or label estimates, by the method; shards that were not visited yet are left out. A run whose
        method remembers none has `predict()`.
        """
        store, field = self._recorded.store, belief_field(self._recorded.store)
        if store is None or field is None:
            raise UserError(f"{self.url}: the method {self.config.method['name']!r} remembers no scores of all "
                            "classes. Use predict(), which asks the model.")
        source = self._recorded.train
        if source is None:
            raise UserError(f"{self.url}: its training set {self.config.data.train.url} cannot be read any more.")
        name = self.state(snapshot).snapshot
        view = state_view(store, name, field, source)
        found = {shard: part for shard in _chosen(source, shards) if (part := view.shard(shard)) is not None}
        return _scores(source, found, f"field {field!r} of snapshot {name}")

    def predict(self, url: str | None = None, labels: str | None = None, *, subset: str | None = None,
                shards: Sequence[int] | None = None, checkpoint: str | None = None) -> Scores:
        """The model's scores for the samples of a dataset folder (default: the run's own training set).

            scores = run.predict("shards/test")
            lacuna.average_precision(scores.scores, scores.labels).summary()["map"]

        As the run's method makes them of logits, in evaluation mode, without augmentation; samples that cannot
        be decoded are left out. `labels` names the sidecar (default: `labels`, or the run's own for its training set).
        """
        from lacuna.tools.passes.scoring import ShardModel
        from lacuna.tools.passes.trained import load_model

        trained = open_trained(self._checkpoint(checkpoint))
        source = open_dataset(trained, url, labels or "labels", subset) if url else training_set(
            trained, None, labels, subset)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = ShardModel(load_model(trained, source, device), source, trained.config)
        found = {}
        for shard in _chosen(source, shards):
            values, facts = model.scores(shard)
            if len(facts["rows"]):
                found[shard] = (values, facts["rows"])
        return _scores(source, found, trained.checkpoint.rsplit("/", 1)[-1])

    def __repr__(self) -> str:
        return f"RunReader({self.url!r})"


def open_run(url: str) -> RunReader:
    """A run folder (`run_folder/name` of its config) on a disk or at any fsspec URL.

        run = lacuna.open_run("runs/my-run")
        run.metrics.frame()                    # every reported step, as a DataFrame
        run.results.test["map"]                # once it has finished
        run.beliefs().frame()                  # what it believes about its training labels
        run.predict("shards/test").scores      # float32 [n, L]
        run.checkpoint()                       # weights by name

    Nothing is written, and a run that still goes on can be read.
    """
    return RunReader(url)


def _chosen(source: ShardSource, shards: Sequence[int] | None) -> list[int]:
    there = np.flatnonzero(source.counts).tolist()
    if shards is None:
        return there
    unknown = [shard for shard in shards if not 0 <= shard < len(source.counts)]
    if unknown:
        raise UserError(f"shards={list(shards)}: {source.index.url} has shards 0..{len(source.counts) - 1}.")
    return [shard for shard in shards if shard in set(there)]


def _scores(source: ShardSource, found: dict[int, tuple[np.ndarray, np.ndarray]], origin: str) -> Scores:
    values, labels = [np.zeros((0, source.classes), np.float32)], [np.zeros((0, source.classes), np.int8)]
    keys, places = list[str](), [np.zeros((0, 2), np.int64)]
    for shard, (part, rows) in found.items():
        names = source.index.members(shard).keys
        values.append(part)
        labels.append(source.sidecar.labels(shard).dense(source.classes, rows))
        keys += [names[row] for row in rows]
        places.append(np.stack([np.full(len(rows), shard), rows], axis=1))
    shards, rows = np.concatenate(places).T
    return Scores(np.concatenate(values), np.concatenate(labels), keys, shards, rows, source.index.classes, origin)
