"""PASCAL VOC image-level labels from ImageSets/Main/<class>_<split>.txt: 1 positive, -1 negative, 0 "difficult".

Classes are in alphabetical order and file names sorted. An image without any positive is skipped, as in the protocol of
Cole et al. (2021), unless `--all-images`.

`--difficult` says what a class is whose only objects in the image are hard to recognise (0):
  negative  Cole et al. (2021) and all who use their label matrices: ROLE, LL, EM, EN with SCL, … (the default)
  positive  SCPNet, and others who take the labels from the boxes of the XML files
  unknown   the challenge's own evaluation, which leaves such pairs out; all other classes stay negative
"""

from __future__ import annotations

import os

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, read_lines, require_folder, without_missing

_LEGAL = {"1", "-1", "0"}
DIFFICULT = ("negative", "positive", "unknown")


def configure(group) -> None:
    group.add_argument("--root", required=True, metavar="DIR", help="e.g. VOCdevkit/VOC2012")
    group.add_argument("--split", default="train", help="train, val, trainval or test (default: train)")
    group.add_argument("--difficult", choices=DIFFICULT, default="negative",
                       help="what a class with difficult objects only is (default: negative; see below)")
    group.add_argument("--all-images", action="store_true", help="also images without any positive")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def read(root: str, split: str = "train", difficult: str = "negative", all_images: bool = False,
         skip_missing: bool = False) -> Dataset:
    folder = require_folder(root, "--root")
    sets = require_folder(f"{folder}/ImageSets/Main", "--root")
    ending = f"_{split}.txt"
    classes = sorted(name.removesuffix(ending) for name in os.listdir(sets) if name.endswith(ending))
    if not classes:
        raise UserError(f"{sets}: no file <class>{ending}. Check --root and --split.")
    positives: dict[str, list[int]] = {}
    hard: dict[str, list[int]] = {}
    for index, name in enumerate(classes):
        for image, value in _values(f"{sets}/{name}{ending}"):
            positives.setdefault(image, [])
            hard.setdefault(image, [])
            if value == "1" or (value == "0" and difficult == "positive"):
                positives[image].append(index)
            elif value == "0":
                hard[image].append(index)
    names = sorted(name for name, found in positives.items() if found or all_images)
    bare = sorted(name for name, found in positives.items() if not found)
    samples = [file_sample(f"{folder}/JPEGImages/{name}.jpg", f"{name}.jpg") for name in names]
    labels = _labels([positives[name] for name in names], [hard[name] for name in names], len(classes), difficult)
    skipped = [] if all_images else [f"{name}.jpg\tno positive (kept with --all-images)" for name in bare]
    source = {"reader": "voc", "root": root, "difficult": difficult, "images_without_positive": len(bare)}
    dataset = Dataset(classes, samples, labels, split, source=source, skipped=skipped)
    return without_missing(dataset, skip_missing, "--root")


def _values(path: str) -> list[tuple[str, str]]:
    values = []
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split()  # the files pad single digits with a second space
        if len(fields) != 2 or fields[1] not in _LEGAL:
            raise UserError(f"{path}:{number}: {line!r}; expected an image and one of 1, -1, 0.")
        values.append((fields[0], fields[1]))
    return values


def _labels(positives: list[list[int]], hard: list[list[int]], classes: int, difficult: str) -> SparseLabels:
    if difficult != "unknown":
        return SparseLabels.from_lists(positives, [[]] * len(positives), NEGATIVE)
    negatives = [sorted(set(range(classes)) - set(pos) - set(unsure))
                 for pos, unsure in zip(positives, hard, strict=True)]
    return SparseLabels.from_lists(positives, negatives, UNKNOWN)
