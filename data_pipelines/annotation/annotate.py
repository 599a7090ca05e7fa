"""Simulated partial annotation: writes a new label sidecar, or subsets of the rows, over the same tars."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.hierarchy import GraphTruncation
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.annotation.schemes import (
    Draw,
    FixedPerClass,
    ImageFraction,
    PositiveFraction,
    RandomPerAnnotation,
    SinglePositive,
)
from lacuna.data_pipelines.groups import Groups
from lacuna.data_pipelines.index import Sidecar, SidecarWriter, sidecar_names
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.subsets import Subset, subset_names

AnyScheme = SinglePositive | RandomPerAnnotation | FixedPerClass | ImageFraction | PositiveFraction | GraphTruncation
SCHEMES: dict[str, type[AnyScheme]] = {
    "single_positive": SinglePositive,
    "rpa": RandomPerAnnotation,
    "fpc": FixedPerClass,
    "image_fraction": ImageFraction,
    "positive_fraction": PositiveFraction,
    "graph": GraphTruncation,
}


def annotate(rows: LabelledRows, name: str, scheme_name: str, scheme: AnyScheme, *, overwrite: bool = False,
             advance: Callable[[int], None] | None = None) -> Sidecar:
    """Write the sidecar `name`; rows outside `rows.within` know nothing. `advance(n)` is told about n finished rows."""
    if name == rows.sidecar.name:
        raise UserError(f"--name {name!r} is the sidecar that the labels are taken from. Choose another name.")
    refuse_existing(name, sidecar_names(rows.index), overwrite)
    source = {"scheme": scheme_name, **asdict(scheme), **_origin(rows)}
    writer = SidecarWriter(rows.index, name, UNKNOWN, source)
    draw = scheme.prepare(rows)
    for shard in range(len(rows.index.shards)):
        writer.write(shard, _drawn(rows, shard, draw))
        if advance:
            advance(rows.index.shards[shard].count)
    source["counts"] = {
        "positives": int(writer.positives.sum()), "negatives": int(writer.negatives.sum()),
        "classes_with_positives": int((writer.positives > 0).sum()),
        "classes_with_negatives": int((writer.negatives > 0).sum()),
        "positives_before": int(rows.sidecar.positives.sum()), "negatives_before": int(rows.sidecar.negatives.sum()),
    }
    return writer.close()


def keep_rows(rows: LabelledRows, name: str, scheme: ImageFraction, overwrite: bool = False) -> Subset:
    """The subset of the images that `image_fraction` keeps, for runs that leave the others out."""
    refuse_existing(name, subset_names(rows.index), overwrite)
    source = {"scheme": "image_fraction", **asdict(scheme), "within": rows.within.name if rows.within else None}
    subset = Subset.from_masks(rows.index, name, rows.masks(scheme.chosen(rows)), source)
    subset.save()
    return subset


def split_rows(rows: LabelledRows, names: tuple[str, str], fraction: float = 0.2, seed: int = 1200,
               overwrite: bool = False, groups: str | None = None) -> tuple[Subset, Subset]:
    """Cole et al.'s train / val split of the rows in their original order, bit for bit, as two subsets; with groups,
    whole ones are drawn."""
    for name in names:
        refuse_existing(name, subset_names(rows.index), overwrite)
    if groups is None:
        train, val = split_places(len(rows.order), fraction, seed)
    else:
        train, val = split_groups(Groups.load(rows.index, groups).numbers[rows.order], fraction, seed)
    made = []
    for name, places in zip(names, (train, val), strict=True):
        source = {"scheme": "val_split", "fraction": fraction, "seed": seed, "groups": groups,
                  "within": rows.within.name if rows.within else None,
                  "places_fingerprint": places_fingerprint(places)}
        made.append(Subset.from_masks(rows.index, name, rows.masks(rows.order[places]), source))
    for subset in made:
        subset.save()
    return made[0], made[1]


def split_places(count: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, val) places among `count` samples in their original order, ascending."""
    held_out = _held_out(count, fraction)
    shuffled = np.random.RandomState(seed).permutation(count)
    return np.sort(shuffled[: count - held_out]), np.sort(shuffled[count - held_out :])


def split_groups(numbers: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, val) places of samples with these group numbers: groups are drawn until val has its share of the samples;
    one without a group is a group of its own."""
    held_out = _held_out(len(numbers), fraction)
    alone = numbers < 0
    every = np.where(alone, numbers.max(initial=-1) + 1 + np.cumsum(alone), numbers)
    _, own, sizes = np.unique(every, return_inverse=True, return_counts=True)
    drawn = np.random.RandomState(seed).permutation(len(sizes))
    taken = drawn[: np.searchsorted(np.cumsum(sizes[drawn]), held_out) + 1]
    if len(taken) == len(sizes):
        raise UserError(f"--groups: the {len(sizes)} groups are too large to leave some on both sides. Use a smaller "
                        f"--fraction than {fraction}, or finer groups.")
    in_val = np.isin(own, taken)
    return np.flatnonzero(~in_val), np.flatnonzero(in_val)


def _held_out(count: int, fraction: float) -> int:
    held_out = int(np.round(fraction * count))
    if not 0 < held_out < count:
        raise UserError(f"--fraction {fraction}: of {count} rows it puts {held_out} into the validation set; "
                        "give a number between 0 and 1 that leaves rows on both sides.")
    return held_out


def places_fingerprint(places: np.ndarray) -> str:
    """Names a split independently of shards: the first 16 hex digits of the sha256 of its places as int64."""
    return hashlib.sha256(places.astype("<i8").tobytes()).hexdigest()[:16]


def _drawn(rows: LabelledRows, shard: int, draw: Draw) -> SparseLabels:
    """What remains of one shard's labels, packed chunk by chunk."""
    count = rows.index.shards[shard].count
    lengths = np.zeros((2, count), np.int64)
    ids: tuple[list[np.ndarray], list[np.ndarray]] = ([np.zeros(0, np.int32)], [np.zeros(0, np.int32)])
    for chunk in rows.chunks(shard):
        part = SparseLabels.from_dense(draw(chunk))
        for kind, (ptr, found) in enumerate(((part.pos_ptr, part.pos_ids), (part.neg_ptr, part.neg_ids))):
            lengths[kind, chunk.rows] = np.diff(ptr)
            ids[kind].append(found)
    pos_ptr, neg_ptr = (np.concatenate([[0], np.cumsum(each)]) for each in lengths)
    return SparseLabels(pos_ptr, np.concatenate(ids[0]), neg_ptr, np.concatenate(ids[1]))


def _origin(rows: LabelledRows) -> dict:
    return {"from": rows.sidecar.name, "from_fingerprint": rows.sidecar.fingerprint,
            "within": rows.within.name if rows.within else None,
            "within_fingerprint": rows.within.fingerprint if rows.within else None}


def refuse_existing(name: str, existing: list[str], overwrite: bool) -> None:
    if name in existing and not overwrite:
        raise UserError(f"{name!r} exists already (there are {', '.join(existing)}). Choose another --name, or add "
                        "--overwrite to replace it.")
