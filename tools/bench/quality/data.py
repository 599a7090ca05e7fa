"""Shards for `bench quality`: real COCO features or photos with full labels and several partial annotations of them.

Source layout (coco_features/, coco_photos/): classes.txt; train_labels.tsv and test_labels.tsv with the columns image,
full and single (class numbers parted by spaces); train_features.npy and test_features.npy, or the folders train/ and
test/ with the photos.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.annotate import annotate, split_rows
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.annotation.schemes import FixedPerClass, PositiveFraction
from lacuna.data_pipelines.index import ShardIndex, Sidecar, SidecarWriter, sidecar_names
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers.base import Dataset, Sample, file_sample, read_class_list
from lacuna.data_pipelines.readers.features import FeatureRow
from lacuna.data_pipelines.subsets import Subset, subset_names

_SEED = 1200  # of the negatives that IU is told, and of the rows with full labels
FULL, _FULL_ROWS = "full300", 300
SCHEMES: dict[str, tuple[str, FixedPerClass | PositiveFraction]] = {
    "fpc300": ("fpc", FixedPerClass(per_class=300)),
    "pos10": ("positive_fraction", PositiveFraction(fraction=0.1)),
}


def prepare(source: str, out: str, val_fraction: float) -> str:
    """The folder with the shards `train` (subsets train and val) and `test`; made once, finished if it was killed.

    Sidecars: labels (full); single, the published positive; iu and iun, the same with one and with all true negatives;
    fpc300 and pos10, drawn among the rows of the subset `train`; and so is the subset full300.
    """
    folder = os.path.join(out, "shards", os.path.basename(os.path.normpath(source)))
    for split in ("train", "test"):
        url = os.path.join(folder, split)
        rows = label_rows(os.path.join(source, f"{split}_labels.tsv"))
        if not os.path.exists(os.path.join(url, "index.json")):
            pack(dataset(source, split, rows), url, Layout())
        if split == "train":
            _annotate(ShardIndex.load(url), rows, val_fraction)
    return folder


def label_rows(path: str) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8") as f:
            rows = list(csv.DictReader(f, delimiter="\t"))
    except FileNotFoundError:
        raise UserError(f"--data: there is no {path}. Give the folder that holds coco_features/ and "
                        "coco_photos/.") from None
    lacking = [name for name in ("image", "full", "single") if not rows or name not in rows[0]]
    if lacking:
        raise UserError(f"{path}: no column {lacking[0]!r}; it needs image, full and single, parted by tabs.")
    return rows


def dataset(source: str, split: str, rows: list[dict[str, str]]) -> Dataset:
    names, class_ids = read_class_list(os.path.join(source, "classes.txt"))
    labels = SparseLabels.from_lists([_ids(row["full"]) for row in rows], [[]] * len(rows), NEGATIVE)
    features = os.path.join(source, f"{split}_features.npy")
    samples: Sequence[Sample]
    if os.path.exists(features):
        samples, kind = [Sample(f"{i:08d}", FeatureRow(features, i), "npy") for i in range(len(rows))], "feature"
    else:
        samples, kind = [file_sample(os.path.join(source, split, row["image"]), row["image"]) for row in rows], "image"
    return Dataset(names, samples, labels, split, class_ids, kind=kind, source={"from": os.path.basename(source)})


def _annotate(index: ShardIndex, rows: list[dict[str, str]], val_fraction: float) -> None:
    classes = np.arange(len(index.classes))
    rng = np.random.RandomState(_SEED)
    single, one, every = [], [], []
    for row in rows:
        wrong = np.setdiff1d(classes, _ids(row["full"])).tolist()
        single.append(_ids(row["single"]))
        one.append([wrong[rng.randint(len(wrong))]] if wrong else [])
        every.append(wrong)
    for name, negatives in (("single", [[]] * len(rows)), ("iu", one), ("iun", every)):
        if name not in sidecar_names(index):
            writer = SidecarWriter(index, name, UNKNOWN, {"from": "published single positives"})
            for shard in range(len(index.shards)):
                at = index.members(shard).positions
                writer.write(shard, SparseLabels.from_lists([single[p] for p in at], [negatives[p] for p in at]))
            writer.close()
    truth = Sidecar.load(index, "labels")
    if "val" not in subset_names(index):
        split_rows(LabelledRows(index, truth), ("train", "val"), val_fraction, overwrite=True)
    if FULL not in subset_names(index):
        _few_full_rows(index)
    for name, (scheme_name, scheme) in SCHEMES.items():
        if name not in sidecar_names(index):
            annotate(LabelledRows(index, truth, Subset.load(index, "train")), name, scheme_name, scheme)


def _few_full_rows(index: ShardIndex) -> None:
    """Training rows whose full labels a run may learn from."""
    masks = [Subset.load(index, "train").mask(shard) for shard in range(len(index.shards))]
    mask = np.concatenate(masks)
    mask[np.random.RandomState(_SEED).permutation(np.flatnonzero(mask))[_FULL_ROWS:]] = False
    Subset.from_masks(index, FULL, np.split(mask, np.cumsum([len(m) for m in masks])[:-1]),
                      {"from": "train, drawn"}).save()


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]
