"""Scores and features as `lacuna select` gets them from a pass, but drawn: for oracles that recompute from scratch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lacuna.data_pipelines.labels import UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.scoring import shard_rows
from lacuna.tools.suggest.evidence import Decided, Scored


def scored_shards(url: str, folder: Path, seed: int, width: int, decided: Decided | None = None) -> Scored:
    """Some features are near-duplicates of others."""
    source, rng = ShardSource.load(url, "single", None), np.random.default_rng(seed)
    parts = Parts(str(folder), f"drawn{seed}")
    for shard, count in shard_rows(source).items():
        vectors = rng.normal(size=(count, width))
        vectors[1::5] = vectors[:1] + 1e-3 * vectors[1::5]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        parts.write(shard, {"scores": rng.random((len(vectors), source.classes), np.float32),
                            "features": vectors.astype(np.float16), "rows": np.arange(len(vectors))})
    return Scored(parts, source, decided or {})


def open_samples(scored: Scored) -> dict[tuple[int, int], tuple[dict[int, float], np.ndarray]]:
    """(shard, row) → (class → belief of its open entries, features), of all samples."""
    found = {}
    for shard, part, labels in scored.shards():
        for at, row in enumerate(part["rows"].tolist()):
            beliefs = {cls: float(part["scores"][at, cls]) for cls in range(scored.source.classes)
                       if labels[at, cls] == UNKNOWN and (shard, row, cls) not in scored.decided}
            found[shard, row] = (beliefs, part["features"][at].astype(np.float64))
    return found
