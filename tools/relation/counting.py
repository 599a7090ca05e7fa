"""How likely a class is where another one is: counted in labels, or added up from a model's beliefs.

Legend: S_ij = P(j | i). Labels: of the samples with i and a known label of j, the share with j. Beliefs p:
Σ p_i p_j / Σ p_i over the samples (Scob's label correlation, from scores instead of its label estimates).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.parts import fingerprint_of
from lacuna.tools.passes.pool import PoolSettings, open_pool
from lacuna.tools.passes.scoring import Arrays, bad_of, on_this_device, pass_facts, shard_rows
from lacuna.tools.passes.trained import Trained
from lacuna.trainer.evaluate import judge_bad


def from_labels(rows: LabelledRows) -> np.ndarray:
    together, known = (np.zeros((rows.classes, rows.classes)) for _ in range(2))
    for chunk in rows.all_chunks():
        there = (chunk.targets == POSITIVE).astype(np.float32)  # sums of a chunk are whole numbers below 2^24
        together += there.T @ there
        known += there.T @ (chunk.targets != UNKNOWN).astype(np.float32)
    if not np.any(known - np.diag(np.diag(known))):
        raise UserError(f"--labels {rows.sidecar.name}: no sample of {rows.index.url} has a positive and a second "
                        "known label, so nothing can be counted. Name a sidecar with full labels, or use a model's "
                        "beliefs: `lacuna relation beliefs RUN`.")
    return np.divide(together, known, out=np.zeros_like(together), where=known > 0)


def from_scores(shards: Iterable[np.ndarray], classes: int) -> np.ndarray:
    """Of scores [n, L] in [0, 1], shard by shard."""
    total = PairSums.none(classes)
    for scores in shards:
        total.add(scores)
    return total.conditional()


def from_table(url: str, index: ShardIndex, name: str) -> np.ndarray:
    """Of a table that `lacuna scores` or `lacuna import-scores` made."""
    store = state_store.open(url)
    snapshots = store.snapshots()
    if store.schema.fingerprint.partition("-")[0] != index.fingerprint or not snapshots:
        raise UserError(f"{url}: no finished table for the shards {index.url} ({index.fingerprint}). Give the --shards "
                        "that it was made for.")
    if name not in store.schema.fields:
        raise UserError(f"--table {name}: {url} has {sorted(store.schema.fields)}.")
    reader = store.reader(snapshots[-1].name)
    return from_scores((reader.read_shard(name, shard).astype(np.float32) for shard in range(len(index.shards))),
                       len(index.classes))


@dataclass
class PairSums:
    pairs: np.ndarray  # float64 [L, L], Σ p_i p_j
    single: np.ndarray  # float64 [L], Σ p_i

    @classmethod
    def none(cls, classes: int) -> PairSums:
        return cls(np.zeros((classes, classes)), np.zeros(classes))

    def add(self, scores: np.ndarray) -> None:
        if len(scores):
            values = np.clip(scores, 0, 1).astype(np.float64)
            self.pairs += values.T @ values
            self.single += values.sum(0)

    def conditional(self) -> np.ndarray:
        return np.divide(self.pairs, self.single[:, None], out=np.zeros_like(self.pairs),
                         where=self.single[:, None] > 0)


@dataclass(frozen=True)
class PairJob:
    """Parts with `pairs` and `single` of the scores of a shard, and `rows`, `bad`."""

    trained: Trained
    source: ShardSource

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(job="pairs", **pass_facts(self.trained, self.source))

    def build(self) -> Callable[[int], Arrays]:
        worker, classes = on_this_device(self.trained, self.source), self.source.classes

        def work(shard: int) -> Arrays:
            scores, facts = worker.scores(shard)
            sums = PairSums.none(classes)
            sums.add(scores)
            return {"pairs": sums.pairs, "single": sums.single, **facts}

        return work


def from_run(trained: Trained, source: ShardSource, settings: PoolSettings) -> np.ndarray:
    """One pass over the shards; sums are added in shard order."""
    rows = shard_rows(source)
    with open_pool(settings) as pool:
        parts = pool.run(PairJob(trained, source), rows, settings.folder(trained.run),
                         f"pairs of classes in {source.index.url}")
    total, bad = PairSums.none(source.classes), []
    for _, part in parts.read_all(list(rows)):
        total.pairs += part["pairs"]
        total.single += part["single"]
        bad += bad_of(part)
    judge_bad(bad, sum(rows.values()), trained.config.data.max_bad_fraction, source.index.url)
    if not settings.parts:
        parts.remove(list(rows))
    return total.conditional()
