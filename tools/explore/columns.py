"""Column indexes: for every class, which samples to look at. Built once, shard by shard; then read from disk.

    missing.npy      [L, M] unknown entries with the highest beliefs, falling
    disagree.npy     [L, M] annotated entries that the model believes least: a low positive, a high
                     negative; the score is |label − belief|
    …_order.npy      the same of all classes together
    starts.npy, annotated.npy   of class c, samples annotated positive: annotated[starts[c] : starts[c + 1]]
    columns.json     what they were made from, written last
Memory is one shard's beliefs and 2 · L · M places, whatever the number of samples.
Legend: n samples of a shard, L classes, M places kept of a class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lacuna.basics import storage
from lacuna.basics.npy_header import alone
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.source import ShardSource

PLACE = np.dtype([("shard", "<i4"), ("row", "<i4"), ("score", "<f4")])
NOWHERE = -1  # shard of an empty place
VIEWS = ("missing", "disagree")
_ENTRIES = 2_000_000  # places of all classes together
_PER_CLASS = 1000
Beliefs = Callable[[int], tuple[np.ndarray, np.ndarray] | None]  # shard → (probabilities [n, L], rows [n])


@dataclass(frozen=True)
class Columns:
    """The finished files; arrays are mapped, not read."""

    folder: str
    places: dict[str, np.ndarray]  # view → PLACE [L, M]
    orders: dict[str, np.ndarray]  # view → int64, places of all classes by falling score
    starts: np.ndarray
    annotated: np.ndarray  # int32 [entries, 2]: shard and row
    facts: dict

    @classmethod
    def open(cls, folder: str) -> Columns | None:
        path = os.path.join(folder, "columns.json")
        if not os.path.exists(path):
            return None
        names = (*VIEWS, *(view + "_order" for view in VIEWS), "starts", "annotated")
        arrays = alone(lambda: {name: np.load(os.path.join(folder, name + ".npy"), mmap_mode="r") for name in names})
        return cls(folder, {view: arrays[view] for view in VIEWS}, {view: arrays[view + "_order"] for view in VIEWS},
                   arrays["starts"], arrays["annotated"], json.loads(storage.read_bytes(path)))

    def list(self, view: str, cls: int | None, start: int, count: int) -> tuple[int, list[dict]]:
        """(how many there are, a page of them): of one class, or of all classes together for missing and disagree."""
        if view == "annotated":
            assert cls is not None
            first, end = int(self.starts[cls]), int(self.starts[cls + 1])
            page = self.annotated[first + start : min(end, first + start + count)]
            return end - first, [{"shard": int(s), "row": int(r), "class": cls, "score": None} for s, r in page]
        table = self.places[view]
        if cls is not None:
            total = int((table[cls]["shard"] != NOWHERE).sum())
            page = table[cls][start : min(total, start + count)]
            return total, [_item(place, cls) for place in page]
        order, width = self.orders[view], table.shape[1]
        return len(order), [_item(table[i // width, i % width], int(i // width)) for i in order[start : start + count]]


def _item(place: np.ndarray, cls: int) -> dict:
    return {"shard": int(place["shard"]), "row": int(place["row"]), "class": cls, "score": float(place["score"])}


def build(folder: str, source: ShardSource, beliefs: Beliefs, facts: dict) -> Columns:
    """One streaming pass over labels and beliefs."""
    os.makedirs(folder, exist_ok=True)
    classes, most = source.classes, max(1, min(_PER_CLASS, _ENTRIES // source.classes))
    best = {view: np.full((classes, most), np.array((NOWHERE, 0, -1), PLACE)) for view in VIEWS}
    starts = np.concatenate([[0], np.cumsum(source.sidecar.positives)])
    # Sized by the whole sidecar; a subset fills less, so every class keeps count of its own.
    annotated = np.lib.format.open_memmap(os.path.join(folder, "annotated.npy"), "w+", np.int32, (int(starts[-1]), 2))
    filled = starts[:-1].copy()
    with Progress(int(source.counts.sum()), "indexing classes", "samples") as meter:
        for shard in np.flatnonzero(source.counts).tolist():
            used = used_rows(source, shard)
            labels = source.sidecar.labels(shard)
            _note_positives(annotated, filled, shard, used, labels.take(used))
            found = beliefs(shard)
            if found is not None:
                _merge(best, shard, *found, labels.dense(classes, found[1]))
            meter.advance(len(used))
    annotated.flush()
    # What a subset left empty is closed up, so that a class's samples are one run.
    ends = np.concatenate([[0], np.cumsum(filled - starts[:-1])])
    if ends[-1] != starts[-1]:
        kept = np.concatenate([annotated[a:b] for a, b in zip(starts[:-1], filled, strict=True)])
        np.save(os.path.join(folder, "annotated.npy"), kept)
    np.save(os.path.join(folder, "starts.npy"), ends)
    for view in VIEWS:
        np.save(os.path.join(folder, view + ".npy"), best[view])
        there = np.flatnonzero(best[view]["shard"].reshape(-1) != NOWHERE)
        order = there[np.argsort(-best[view]["score"].reshape(-1)[there], kind="stable")]
        np.save(os.path.join(folder, view + "_order.npy"), order)
    storage.write_atomic(os.path.join(folder, "columns.json"), json.dumps(facts).encode())
    made = Columns.open(folder)
    assert made is not None
    return made


def _note_positives(annotated: np.ndarray, filled: np.ndarray, shard: int, rows: np.ndarray,
                    labels: SparseLabels) -> None:
    """Append the shard's annotated samples to their classes; `filled` says where each class stands."""
    order = np.argsort(labels.pos_ids, kind="stable")
    classes = labels.pos_ids[order]
    counts = np.bincount(classes, minlength=len(filled))
    within = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = filled[classes] + within
    annotated[at, 0], annotated[at, 1] = shard, np.repeat(rows, np.diff(labels.pos_ptr))[order]
    filled += counts


def used_rows(source: ShardSource, shard: int) -> np.ndarray:
    """Rows of the shard that take part."""
    if source.subset is None:
        return np.arange(source.index.shards[shard].count)
    return np.flatnonzero(source.subset.mask(shard))


def _merge(best: dict[str, np.ndarray], shard: int, values: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> None:
    """Lay a shard's best entries of every class beside those so far and keep the highest."""
    wrong = np.where(labels == POSITIVE, 1 - values, np.where(labels == NEGATIVE, values, -1.0))
    for view, scores in (("missing", np.where(labels == UNKNOWN, values, -1.0)), ("disagree", wrong)):
        table = best[view]
        bars = np.maximum(table[:, -1]["score"], 0.0)
        for cls in np.flatnonzero(scores.max(axis=0) > bars).tolist():
            column = scores[:, cls]
            better = np.flatnonzero(column > bars[cls])
            fresh = np.empty(len(better), PLACE)
            fresh["shard"], fresh["row"], fresh["score"] = shard, rows[better], column[better]
            joined = np.concatenate([table[cls], fresh])
            # Places already there come first among equals: the order does not depend on how shards are cut.
            table[cls] = joined[np.argsort(-joined["score"], kind="stable")[: table.shape[1]]]
