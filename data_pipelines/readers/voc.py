"""PASCAL VOC image-level labels from ImageSets/Main/<class>_<split>.txt: 1 positive, -1 negative, 0 "difficult".

Classes are in alphabetical order and file names sorted; a "difficult" object does not make its class positive. An image
without any positive is left out, as in the protocol of Cole et al. (2021), unless `--all-images`.
"""

from __future__ import annotations

import os

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, read_lines, require_folder, without_missing

_LEGAL = {"1", "-1", "0"}


def configure(group) -> None:
    group.add_argument("--root", required=True, metavar="DIR", help="e.g. VOCdevkit/VOC2012")
    group.add_argument("--split", default="train", help="train, val, trainval or test (default: train)")
    group.add_argument("--all-images", action="store_true", help="also images without any positive (all negative)")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def read(root: str, split: str = "train", all_images: bool = False, skip_missing: bool = False) -> Dataset:
    folder = require_folder(root, "--root")
    sets = require_folder(f"{folder}/ImageSets/Main", "--root")
    ending = f"_{split}.txt"
    classes = sorted(name.removesuffix(ending) for name in os.listdir(sets) if name.endswith(ending))
    if not classes:
        raise UserError(f"{sets}: no file <class>{ending}. Check --root and --split.")
    positives: dict[str, list[int]] = {}
    for index, name in enumerate(classes):
        path = f"{sets}/{name}{ending}"
        for number, line in enumerate(read_lines(path), 1):
            fields = line.split()  # the files pad single digits with a second space
            if len(fields) != 2 or fields[1] not in _LEGAL:
                raise UserError(f"{path}:{number}: {line!r}; expected an image and one of 1, -1, 0.")
            found = positives.setdefault(fields[0], [])
            if fields[1] == "1":
                found.append(index)
    names = sorted(name for name, found in positives.items() if found or all_images)
    samples = [file_sample(f"{folder}/JPEGImages/{name}.jpg", f"{name}.jpg") for name in names]
    labels = SparseLabels.from_lists([positives[name] for name in names], [[]] * len(names), NEGATIVE)
    dataset = Dataset(classes, samples, labels, split, source={"reader": "voc", "root": root})
    return without_missing(dataset, skip_missing)
