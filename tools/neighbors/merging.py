"""What the neighbours of each sample say about which classes: their annotations, merged into bits by class.

Legend: N samples of the dataset, n rows of a shard, k neighbours, M classes that a row's neighbours annotate at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lacuna.basics.progress import Progress
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.tools.passes.parts import Parts, fingerprint_of
from lacuna.trainer.neighbors import NONE


def all_labels(sidecar: Sidecar) -> SparseLabels:
    """Of all samples in shard order: a few bytes an annotation, so 9 million images with 10 each take 0.5 GB."""
    shards = [sidecar.labels(shard) for shard in range(len(sidecar.index.shards))]
    return SparseLabels(_joined_ends([s.pos_ptr for s in shards]), np.concatenate([s.pos_ids for s in shards]),
                        _joined_ends([s.neg_ptr for s in shards]), np.concatenate([s.neg_ids for s in shards]),
                        sidecar.unlisted)


def _joined_ends(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.concatenate([np.diff(ptr) for ptr in parts]))])


def merge(neighbors: np.ndarray, labels: SparseLabels, classes: int) -> dict[str, np.ndarray]:
    """Neighbours int64 [n, k] (NONE: there are fewer) → `counts` int64 [n] of annotated classes, and row after row the
    classes ascending with their bits: `near_classes`, `near_positive`, `near_negative`."""
    rows, slots = np.nonzero(neighbors != NONE)
    taken = labels.take(neighbors[rows, slots])
    codes, bits = [], []
    for ptr, ids in ((taken.pos_ptr, taken.pos_ids), (taken.neg_ptr, taken.neg_ids)):
        entry = np.repeat(np.arange(len(rows)), np.diff(ptr))
        codes.append(rows[entry] * classes + ids)
        bits.append(np.left_shift(np.int64(1), slots[entry]))
    distinct = np.unique(np.concatenate(codes))
    return {"counts": np.bincount(distinct // classes, minlength=len(neighbors)),
            "near_classes": (distinct % classes).astype(np.int32),
            "near_positive": _joined(codes[0], bits[0], distinct),
            "near_negative": _joined(codes[1], bits[1], distinct)}


def _joined(codes: np.ndarray, bits: np.ndarray, distinct: np.ndarray) -> np.ndarray:
    """Bits of equal codes together, at the code's place among the distinct ones."""
    out = np.zeros(len(distinct), np.int64)
    if len(codes):
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        out[np.searchsorted(distinct, codes[starts])] = np.bitwise_or.reduceat(bits[order], starts)
    return out


def padded(merged: Mapping[str, np.ndarray], slots: int) -> dict[str, np.ndarray]:
    """The same as arrays [n, M]; NONE and 0 where there are fewer."""
    counts = merged["counts"]
    there = np.arange(slots) < counts[:, None]
    out = {}
    for name, empty in (("near_classes", NONE), ("near_positive", 0), ("near_negative", 0)):
        out[name] = np.full((len(counts), slots), empty, merged[name].dtype)
        out[name][there] = merged[name]
    return out


def merge_parts(found: Parts, sidecar: Sidecar, rows: Mapping[int, int]) -> Parts:
    """What `merge` gives for the parts of a search, in parts beside them. In this process: it takes less time than to
    send all labels to workers."""
    merged = Parts(found.folder, fingerprint_of(job="merge", search=found.fingerprint, labels=sidecar.fingerprint))
    labels, classes = all_labels(sidecar), len(sidecar.index.classes)
    finished = merged.finished(list(rows))
    with Progress(sum(rows.values()), "their labels", "samples") as meter:
        for shard, count in rows.items():
            if shard not in finished:
                merged.write(shard, merge(found.read(shard)["ids"], labels, classes))
            meter.advance(count)
    return merged
