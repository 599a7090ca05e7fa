"""A dataset that is all labels: index, members tables and a sidecar over shards whose tars nobody opens."""

from __future__ import annotations

import numpy as np

from lacuna.basics import storage
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import Shard, ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.shard_tables import Members


def write_dataset(url: str, truth: np.ndarray, sizes: list[int], unlisted: int = NEGATIVE, seed: int = 0,
                  classes: list[str] | None = None) -> LabelledRows:
    """truth int8 [N, L] in the original order, shuffled into shards of the given sizes."""
    assert sum(sizes) == len(truth)
    names = classes or [f"class{c}" for c in range(truth.shape[1])]
    shards = [Shard(f"shard-{s:05d}.tar", rows, 1024 * rows) for s, rows in enumerate(sizes)]
    index = ShardIndex(url, names, shards)
    index.save()
    writer = SidecarWriter(index, "labels", unlisted, {})
    parts = np.split(np.random.RandomState(seed).permutation(len(truth)), np.cumsum(sizes)[:-1])
    for s, positions in enumerate(parts):
        zeros = np.zeros(len(positions), np.int64)
        members = Members([f"{p:06d}" for p in positions], ["jpg"] * len(positions), zeros, zeros, positions)
        storage.write_atomic(index.members_url(s), members.to_bytes())
        writer.write(s, SparseLabels.from_dense(truth[positions], unlisted))
    return LabelledRows(index, writer.close())


def in_original_order(index: ShardIndex, sidecar: Sidecar) -> np.ndarray:
    """int8 [N, L] of a sidecar, shards put back into the original order."""
    positions = np.concatenate([index.members(s).positions for s in range(len(index.shards))])
    dense = np.concatenate([sidecar.labels(s).dense(len(index.classes)) for s in range(len(index.shards))])
    out = np.empty_like(dense)
    out[positions] = dense
    return out


def mask_in_original_order(index: ShardIndex, subset) -> np.ndarray:
    positions = np.concatenate([index.members(s).positions for s in range(len(index.shards))])
    out = np.zeros(len(positions), bool)
    out[positions] = np.concatenate([subset.mask(s) for s in range(len(index.shards))])
    return out
