"""What a model sees in one split: beliefs, features, annotations, and where every sample is.

Legend: n samples, L classes, D feature width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.looking import LookJob
from lacuna.tools.passes.pool import Pool, PoolSettings
from lacuna.tools.passes.scoring import bad_of, shard_rows
from lacuna.tools.passes.trained import Trained
from lacuna.trainer.evaluate import judge_bad


@dataclass(frozen=True)
class Split:
    name: str
    source: ShardSource
    scores: np.ndarray  # float32 [n, L]
    features: np.ndarray  # float16 [n, D], of length 1
    labels: np.ndarray  # int8 [n, L]
    shards: np.ndarray  # int64 [n]
    rows: np.ndarray  # int64 [n]

    def place(self, at: int) -> dict:
        shard, row = int(self.shards[at]), int(self.rows[at])
        return {"split": self.name, "key": self.source.index.members(shard).keys[row], "shard": shard, "row": row}

    def word(self, at: int, cls: int) -> str:
        return "positive" if self.labels[at, cls] == POSITIVE else "negative"


def look_at(pool: Pool, settings: PoolSettings, trained: Trained, source: ShardSource, name: str) -> Split:
    rows = shard_rows(source)
    parts = pool.run(LookJob(trained, source), rows, settings.folder(trained.run), f"looking at {name}")
    pieces: dict[str, list[np.ndarray]] = {key: [] for key in ("scores", "features", "labels", "shards", "rows")}
    bad = []
    for shard, part in parts.read_all(list(rows)):
        bad += bad_of(part)
        if not len(part["rows"]):
            continue
        for key in ("scores", "features", "rows"):
            pieces[key].append(part[key])
        pieces["labels"].append(source.sidecar.labels(shard).dense(source.classes, part["rows"]))
        pieces["shards"].append(np.full(len(part["rows"]), shard))
    judge_bad(bad, int(source.counts.sum()), trained.config.data.max_bad_fraction, source.index.url)
    if not pieces["rows"]:
        raise UserError(f"{source.index.url}: no sample could be read.")
    if not settings.parts:
        parts.remove(list(rows))
    return Split(name, source, **{key: np.concatenate(found) for key, found in pieces.items()})
