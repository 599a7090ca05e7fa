"""CUB-200-2011 with its 312 binary attributes as classes, in the order of images.txt.

A class is positive when `is_present` is 1, whatever the annotator's certainty, as in Cole et al. (2021).
"""

from __future__ import annotations

import os

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.whole_number import whole_number
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, read_lines, require_folder, without_missing

_TRAIN_FLAG = {"train": "1", "test": "0"}


def configure(group) -> None:
    group.add_argument("--root", required=True, metavar="DIR", help="the folder CUB_200_2011")
    group.add_argument("--split", default="train", choices=["train", "test"], help="default: train")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def read(root: str, split: str = "train", skip_missing: bool = False) -> Dataset:
    folder = require_folder(root, "--root")
    files = dict(_pairs(f"{folder}/images.txt"))
    flags = dict(_pairs(f"{folder}/train_test_split.txt"))
    without = [image for image in files if image not in flags]
    if without:
        raise UserError(f"{folder}/train_test_split.txt: has no line for image id {without[0]}.")
    attributes = _pairs(_attribute_names(folder))
    rows = {image: row for row, image in enumerate(i for i in files if flags[i] == _TRAIN_FLAG[split])}
    matrix = _present(f"{folder}/attributes/image_attribute_labels.txt", rows,
                      {id_: column for column, (id_, _) in enumerate(attributes)}, set(files))
    samples = [file_sample(f"{folder}/images/{files[image]}", files[image]) for image in rows]
    dataset = Dataset([name for _, name in attributes], samples, SparseLabels.from_dense(matrix, NEGATIVE), split,
                      [id_ for id_, _ in attributes], source={"reader": "cub", "root": root})
    return without_missing(dataset, skip_missing, "--root")


def _attribute_names(folder: str) -> str:
    """The archive unpacks attributes.txt beside the folder; many copies move it."""
    places = [f"{folder}/attributes/attributes.txt", f"{folder}/attributes.txt", f"{folder}/../attributes.txt"]
    for place in places:
        if os.path.exists(place):
            return place
    raise UserError(f"attributes.txt: not found as {', '.join(places)}. It is in the archive CUB_200_2011.tgz.")


def _pairs(path: str) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        first, _, second = line.strip().partition(" ")
        if whole_number(first) is None or not second:
            raise UserError(f"{path}:{number}: {line!r}; expected a number and a value.")
        pairs.append((first, second.strip()))
    return pairs


def _present(path: str, rows: dict[str, int], columns: dict[str, int], images: set[str]) -> np.ndarray:
    """int8 [N, L] of is_present; every (image, attribute) must be there."""
    matrix = np.zeros((len(rows), len(columns)), np.int8)
    seen = np.zeros(matrix.shape, bool)
    for number, line in enumerate(read_lines(path), 1):
        # image, attribute, is_present, certainty, time; some published lines have stray extra columns after these
        fields = line.split()
        if len(fields) < 4 or fields[0] not in images or fields[1] not in columns or fields[2] not in ("0", "1"):
            raise UserError(f"{path}:{number}: {line!r}; expected image id, attribute id (1..{len(columns)}), 0 or 1, "
                            "certainty, time.")
        row = rows.get(fields[0])
        if row is not None:
            seen[row, columns[fields[1]]] = True
            matrix[row, columns[fields[1]]] = fields[2] == "1"
    if not seen.all():
        row, column = np.argwhere(~seen)[0]
        raise UserError(f"{path}: no line for image id {list(rows)[row]} and attribute id {list(columns)[column]}; the "
                        "file is incomplete. Unpack the archive again.")
    return matrix
