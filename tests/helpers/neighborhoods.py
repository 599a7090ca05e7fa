"""Small datasets that are all labels, and neighbourhoods of them, for tests of Soft Exposure."""

from __future__ import annotations

import numpy as np

from lacuna.data_pipelines.index import Shard, ShardIndex, SidecarWriter
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.neighbors.merging import all_labels, merge, padded
from lacuna.tools.neighbors.storing import write_neighborhood


def annotated_source(url: str, labels: np.ndarray, sizes: list[int]) -> ShardSource:
    """int8 [N, L] cut into shards; tars that nobody opens."""
    index = ShardIndex(url, [f"class{c}" for c in range(labels.shape[1])],
                       [Shard(f"shard-{s:05d}.tar", rows, 1024) for s, rows in enumerate(sizes)])
    index.save()
    writer = SidecarWriter(index, "labels", UNKNOWN, {})
    for shard, part in enumerate(np.split(labels, np.cumsum(sizes)[:-1])):
        writer.write(shard, SparseLabels.from_dense(part))
    return ShardSource(index, writer.close())


def make_neighborhood(url: str, source: ShardSource, neighbors: np.ndarray, distances: np.ndarray,
                      between: np.ndarray) -> None:
    """Of neighbours int64 [N, k] and their distances, written as `lacuna neighbors` does."""
    labels, ends = all_labels(source.sidecar), np.cumsum(source.index.counts)
    merged = [merge(part, labels, source.classes) for part in np.split(neighbors, ends[:-1])]
    slots = max(int(part["counts"].max()) for part in merged)
    rows = [{"neighbor_ids": a, "neighbor_distances": b, **padded(part, slots)}
            for a, b, part in zip(np.split(neighbors, ends[:-1]), np.split(distances, ends[:-1]), merged, strict=True)]
    medians = np.zeros((source.classes, 2))
    write_neighborhood(url, source, neighbors.shape[1], slots, "euclidean", medians, between, enumerate(rows), {})
