"""The labels that scores are held against, and how rows find theirs: by key, never by luck of the order.

Shards: a label sidecar; a row's key is its member's name. ReaL: real.json (a label set for every ImageNet validation
image) and the original labels, both by validation number (entry 0 is ILSVRC2012_val_00000001).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.readers import imagenet
from lacuna.data_pipelines.readers.base import read_lines
from lacuna.data_pipelines.readers.ground_truth import (
    WNID,
    GroundTruth,
    read_ground_truth,
    read_meta,
    validation_stem,
)
from lacuna.data_pipelines.source import ShardSource

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?:\.\w+)?$")
IN_ORDER = "in-order"
NO_LABEL = -1  # in a column of original class ids


@dataclass(frozen=True)
class Truth:
    """Labels of M samples."""

    where: str
    keys: list[str]
    labels: SparseLabels
    classes: list[str]
    class_ids: list[str]
    originals: np.ndarray | None = None  # int64 [M]: the one original class, where there is one

    def rows_of(self, keys: list[str], where: str, allow_missing: bool) -> np.ndarray:
        """int64 [N]: the sample of every key; each sample has one row, or a UserError says which has not."""
        place = {key: row for row, key in enumerate(self.keys)}
        # File names alone will do, where no two folders have the same one.
        counts = Counter(key.rsplit("/", 1)[-1] for key in self.keys)
        short = {name: row for key, row in place.items() if counts[name := key.rsplit("/", 1)[-1]] == 1}
        found = [place.get(key, place.get(_without_ending(key), short.get(_stem(key), NO_LABEL))) for key in keys]
        strange = next((key for key, row in zip(keys, found, strict=True) if row == NO_LABEL), None)
        if strange is not None:
            raise UserError(f"{where}: {strange!r} is not in {self.where}, which has {len(self.keys):,} samples such "
                            f"as {self.keys[0]!r}.")
        twice = next((row for row, count in Counter(found).items() if count > 1), None)
        if twice is not None:
            raise UserError(f"{where}: {self.keys[twice]!r} has more than one row.")
        if len(found) < len(self.keys) and not allow_missing:
            absent = self.keys[int(np.setdiff1d(np.arange(len(self.keys)), found)[0])]
            raise UserError(f"{where}: {len(found):,} rows for the {len(self.keys):,} samples of {self.where}; "
                            f"{absent!r} is missing. Predict them all, or evaluate what is there with --allow-missing.")
        return np.array(found, np.int64)


@dataclass(frozen=True)
class ValLabels:
    """ImageNet's original labels: a file in any form that the imagenet reader takes, or class ids in WNID order."""

    path: str
    wnids: list[str]  # sorted class list, if known
    meta: str | None = None  # the devkit's meta.mat: numbers are then devkit ids

    def read(self, count: int, classes: int) -> np.ndarray:
        """int64 [count]: the class id of validation image i + 1."""
        truth = read_ground_truth(self.path)
        if truth.only_numbers and self.meta is None:
            return self._class_ids(truth, count, classes)
        truth.require([validation_stem(number) for number in range(1, count + 1)], "ReaL's file")
        by_devkit_id = read_meta(self.meta)[0] if self.meta else {}
        wnids = self.wnids or sorted({*by_devkit_id.values(), *truth.wnids})
        if not truth.wnids and not self.wnids and not by_devkit_id:
            wnids = [str(number) for number in range(classes)]  # indices only: nobody needs their names
        if len(wnids) != classes:
            raise UserError(f"--val-labels {self.path}: {len(wnids)} WNIDs are known, but there are {classes} classes. "
                            "Name them all with --synsets.")
        place = {wnid: number for number, wnid in enumerate(wnids)}
        found = [truth.wnid(validation_stem(number), by_devkit_id, wnids) for number in range(1, count + 1)]
        strange = next((wnid for wnid in found if wnid not in place), None)
        if strange is not None:
            raise UserError(f"--val-labels {self.path}: {strange} is no class; the {classes} are such as {wnids[0]}.")
        return np.array([place[wnid] for wnid in found], np.int64)

    def _class_ids(self, truth: GroundTruth, count: int, classes: int) -> np.ndarray:
        if len(truth.labels) != count:
            raise UserError(f"--val-labels {self.path}: {len(truth.labels):,} lines; expected {count:,}, a class id an "
                            "image.")
        ids = np.array([int(label) for label, _ in truth.labels.values()], np.int64)
        if ids.max(initial=0) >= classes:
            line = int(np.argmax(ids >= classes))
            raise UserError(f"--val-labels {self.path}:{line + 1}: {ids[line]}; expected a class id 0..{classes - 1}. "
                            "If these are devkit ids 1..1000, give the devkit's meta.mat with --meta.")
        return ids


def real_truth(real: str, val_labels: ValLabels | None, classes: int) -> Truth:
    """ReaL's label sets by validation number; empty sets stay, the protocol leaves those images out."""
    sets = read_real(real, classes)
    originals = None if val_labels is None else val_labels.read(len(sets), classes)
    names = [validation_stem(number) for number in range(1, len(sets) + 1)]
    labels = SparseLabels.from_lists(sets, [[]] * len(sets), NEGATIVE)
    return Truth(real, names, labels, [str(c) for c in range(classes)], [], originals)


def read_real(path: str, classes: int) -> list[list[int]]:
    sets = imagenet.read_real(path)
    for number, ids in enumerate(sets):
        if not all(0 <= i < classes for i in ids):
            raise UserError(f"--real {path}: entry {number} is {ids}; expected different class ids 0..{classes - 1}.")
    return sets


def shard_truth(source: ShardSource) -> Truth:
    """All labels of a dataset, shard after shard; for prediction files, whose rows come in any order."""
    keys: list[str] = []
    positives: list[np.ndarray] = []
    negatives: list[np.ndarray] = []
    for shard in np.flatnonzero(source.counts):
        used = range(source.index.shards[shard].count) if source.subset is None else (
            np.flatnonzero(source.subset.mask(shard)).tolist())
        names, labels = source.index.members(int(shard)).keys, source.sidecar.labels(int(shard))
        keys += [names[row] for row in used]
        positives += [labels.positives(row) for row in used]
        negatives += [labels.negatives(row) for row in used]
    labels = SparseLabels.from_lists(positives, negatives, source.sidecar.unlisted)
    return Truth(source.index.url, keys, labels, source.index.classes, source.index.class_ids)


def validation_number(key: str) -> int | None:
    """1-based number of an ImageNet validation image, from its name."""
    match = _NUMBER.search(key)
    return int(match.group(1)) if match else None


def class_order(path: str) -> tuple[list[str], np.ndarray]:
    """(sorted WNIDs, order): the file's line c names class c of the predictions, which is class order[c] of ReaL."""
    wnids = [line.split()[0] if line.strip() else "" for line in read_lines(path)]
    odd = next((number for number, wnid in enumerate(wnids, 1) if not WNID.fullmatch(wnid)), None)
    if odd is not None or len(set(wnids)) != len(wnids):
        what = f"line {odd} does not start with a WNID such as n01440764" if odd else "a WNID occurs twice"
        raise UserError(f"--synsets {path}: {what}.")
    ranked = sorted(wnids)
    place = {wnid: number for number, wnid in enumerate(ranked)}
    return ranked, np.array([place[wnid] for wnid in wnids], np.int64)


def folders_of(rows: list[str], wnids: list[str]) -> np.ndarray | None:
    """int64 [N]: class of each row's WNID folder (`n01440764/ILSVRC2012_val_….JPEG`), if all rows have one."""
    place = {wnid: number for number, wnid in enumerate(wnids)}
    found = [place.get(os.path.basename(os.path.dirname(row)), NO_LABEL) for row in rows]
    return np.array(found, np.int64) if found and NO_LABEL not in found else None


def _stem(key: str) -> str:
    return _without_ending(key).rsplit("/", 1)[-1]


def _without_ending(key: str) -> str:
    stem, dot, ending = key.rpartition(".")
    return stem if dot and ending.isalpha() else key
