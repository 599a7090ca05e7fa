"""The steps of `lacuna neighbors`, each a Ray pass over shards that skips what is finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from fsspec.core import url_to_fs

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.neighbors.approximate import build_index
from lacuna.tools.neighbors.featuring import Backbone, write_features
from lacuna.tools.neighbors.medians import MedianJob, class_distances, collect_medians, plan_groups
from lacuna.tools.neighbors.merging import merge_parts, padded
from lacuna.tools.neighbors.searching import SearchJob
from lacuna.tools.neighbors.storing import write_neighborhood
from lacuna.tools.neighbors.vectors import check_bad
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.pool import Pool
from lacuna.tools.passes.scoring import shard_rows
from lacuna.tools.passes.trained import Trained


@dataclass(frozen=True)
class Wishes:
    k: int = 10
    distance: str = "euclidean"
    ivf: bool = False
    median_sample: int | None = None
    memory: int = 1 << 30


def aligned_features(url: str, source: ShardSource) -> ShardSource:
    """Feature shards that have the same samples in the same places; labels and subset are those of the images."""
    index = ShardIndex.load(url)
    first = next(iter(shard_rows(source)), 0)
    same = (index.kind == "feature" and index.counts.tolist() == source.index.counts.tolist()
            and index.members(first).keys == source.index.members(first).keys)
    if not same:
        raise UserError(f"--features {url}: not the features of {source.index.url}: it needs feature shards with the "
                        "same samples in the same order, as `lacuna neighbors` writes them.")
    return ShardSource(index, source.sidecar, source.subset, source.scratch)


def make_neighbors(pool: Pool, source: ShardSource, given: ShardSource | Trained | Backbone | None, out: str,
                   wishes: Wishes, parts: str | None = None) -> dict:
    """Everything in `out`; `given` says where the features of images come from. Returns facts for people."""
    folder = parts or storage.join(out, "parts")
    shards = shard_rows(source)
    if isinstance(given, Trained | Backbone):
        given = write_features(pool, given, source, storage.join(out, "features"), folder)
    features = ShardSource((given or source).index, source.sidecar, source.subset, source.scratch)
    medians = _medians(pool, features, folder, wishes)
    ivf = None
    if wishes.ivf:
        ivf = storage.local_path(storage.join(out, "vectors.faiss"))
        build_index(features, ivf, wishes.memory)
    found = pool.run(SearchJob(features, wishes.k, wishes.distance, wishes.memory, ivf), shards, folder, "neighbours")
    merged = merge_parts(found, source.sidecar, shards)
    facts = _facts(source, found, merged, list(shards), medians)
    check_bad(facts["unreadable"], facts["samples"], features.index.url)
    made = write_neighborhood(out, source, wishes.k, facts["slots"], wishes.distance, medians,
                              class_distances(medians, wishes.distance), _rows(found, merged, list(shards), facts),
                              {**facts, "features": features.index.url, "search": "ivf" if ivf else "exact",
                               "median_sample": wishes.median_sample})
    if parts is None:
        fs, path = url_to_fs(folder)
        fs.rm(path, recursive=True)
        storage.remove([ivf] if ivf else [])
    return {"out": out, "k": made.k, "distance": made.distance, "classes": made.classes, **facts}


def _medians(pool: Pool, features: ShardSource, folder: str, wishes: Wishes) -> np.ndarray:
    counts = features.subset_counts()[0] if features.subset is not None else features.sidecar.positives
    if not counts.any():
        raise UserError(f"--labels {features.sidecar.name}: no annotated positive among the rows that take part, so no "
                        "class has a median.")
    groups = plan_groups(counts if wishes.median_sample is None else np.minimum(counts, 2 * wishes.median_sample),
                         features.feature_width, wishes.memory)
    job = MedianJob(features, counts, groups, wishes.memory, wishes.median_sample)
    done = pool.run(job, {number: group.vectors for number, group in enumerate(groups)}, folder, "class medians")
    return collect_medians(done, groups, features.classes, features.feature_width)


def _facts(source: ShardSource, found: Parts, merged: Parts, shards: list[int], medians: np.ndarray) -> dict:
    slots, near, bad, distances = 1, 0, 0, list[tuple[float, int]]()
    for (_, search), (_, labels) in zip(found.read_all(shards), merged.read_all(shards), strict=True):
        slots, near = max(slots, int(labels["counts"].max(initial=0))), near + int(labels["counts"].sum())
        there = np.isfinite(search["distances"])
        distances.append((float(search["distances"][there].sum(dtype=np.float64)), int(there.sum())))
        bad += int(search["bad"])
    total, count = (sum(part[i] for part in distances) for i in (0, 1))
    samples = int(source.counts.sum())
    names = [source.index.classes[c] for c in np.flatnonzero(np.isnan(medians).any(axis=1))]
    return {"samples": samples, "slots": slots, "near_classes": near / samples, "unreadable": bad,
            "mean_distance": total / max(1, count), "classes_without_positives": names}


def _rows(found: Parts, merged: Parts, shards: list[int], facts: dict) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    for (shard, search), (_, labels) in zip(found.read_all(shards), merged.read_all(shards), strict=True):
        yield shard, {"neighbor_ids": search["ids"], "neighbor_distances": search["distances"],
                      **padded(labels, facts["slots"])}
