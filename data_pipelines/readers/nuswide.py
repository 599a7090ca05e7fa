"""NUS-WIDE, in two forms, with full labels of 81 concepts.

official: ImageList/<Split>Imagelist.txt and Groundtruth/TrainTestLabels/Labels_<concept>_<Split>.txt (0 or 1 a line).
npy: the arrays of Cole et al. (2021): formatted_<split>_images.npy (file names), formatted_<split>_labels.npy (0/1).
Order is the lists' or the arrays'. Images without any positive (a fifth of the set) are kept, as in that protocol.
"""

from __future__ import annotations

import os

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.readers.base import (
    Dataset,
    file_sample,
    load_array,
    read_class_list,
    read_lines,
    require_folder,
    without_missing,
)


def configure(group) -> None:
    group.add_argument("--root", required=True, metavar="DIR", help="has ImageList and Groundtruth, or the .npy files")
    group.add_argument("--images", required=True, metavar="DIR", help="folder or URL of the images, e.g. Flickr")
    group.add_argument("--split", default="train", help="train or test; npy form: as in its file names (train, val)")
    group.add_argument("--classes", metavar="FILE", help="class list; default: Concepts81.txt if there is one")
    group.add_argument("--labelled-only", action="store_true", help="leave out images without any positive")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def read(root: str, images: str, split: str = "train", classes: str | None = None, labelled_only: bool = False,
         skip_missing: bool = False) -> Dataset:
    folder = require_folder(root, "--root")
    names = read_class_list(classes)[0] if classes else _concepts(folder)
    if os.path.exists(f"{folder}/formatted_{split}_labels.npy"):
        files, matrix = _read_npy(folder, split)
        names = names or [f"concept_{column:02d}" for column in range(matrix.shape[1])]
    else:
        files, names, matrix = _read_official(folder, split, names)
    if matrix.shape != (len(files), len(names)):
        raise UserError(f"{root}: {len(files):,} images and {len(names)} classes, but labels of shape {matrix.shape}. "
                        "Give files that belong together.")
    samples = [file_sample(storage.join(images, name), name) for name in files]
    dataset = Dataset(names, samples, SparseLabels.from_dense(matrix, NEGATIVE), split,
                      source={"reader": "nuswide", "root": root, "images": images})
    if labelled_only:
        empty = np.flatnonzero(~(matrix == 1).any(axis=1))
        dataset = dataset.take(np.setdiff1d(np.arange(len(files)), empty), [f"{files[r]}\tno positive" for r in empty])
    return without_missing(dataset, skip_missing)


def _concepts(folder: str) -> list[str]:
    for name in ("Concepts81.txt", "ConceptsList/Concepts81.txt", "Groundtruth/Concepts81.txt"):
        if os.path.exists(f"{folder}/{name}"):
            return read_class_list(f"{folder}/{name}")[0]
    return []


def _read_official(folder: str, split: str, names: list[str]) -> tuple[list[str], list[str], np.ndarray]:
    word = split.capitalize()
    files = [line.strip().replace("\\", "/") for line in read_lines(f"{folder}/ImageList/{word}Imagelist.txt")]
    tables = require_folder(f"{folder}/Groundtruth/TrainTestLabels", "--root")
    ending = f"_{word}.txt"
    names = names or sorted(name.removeprefix("Labels_").removesuffix(ending) for name in os.listdir(tables)
                            if name.startswith("Labels_") and name.endswith(ending))
    if not names:
        raise UserError(f"{tables}: no file Labels_<concept>{ending}. Check --root and --split (train or test).")
    matrix = np.zeros((len(files), len(names)), np.int8)
    for column, name in enumerate(names):
        path = f"{tables}/Labels_{name}{ending}"
        values = [line.strip() for line in read_lines(path)]
        odd = next((number for number, value in enumerate(values, 1) if value not in ("0", "1")), None)
        if odd is not None:
            raise UserError(f"{path}:{odd}: {values[odd - 1]!r}; legal: 0, 1.")
        if len(values) != len(files):
            raise UserError(f"{path}: {len(values):,} lines, but the image list has {len(files):,}.")
        matrix[:, column] = np.array(values, dtype=np.int8)
    return files, names, matrix


def _read_npy(folder: str, split: str) -> tuple[list[str], np.ndarray]:
    files = load_array(f"{folder}/formatted_{split}_images.npy")
    matrix = np.asarray(load_array(f"{folder}/formatted_{split}_labels.npy"))
    if files.dtype.kind not in "US" or files.ndim != 1 or matrix.ndim != 2 or not np.isin(matrix, (0, 1)).all():
        raise UserError(f"{folder}/formatted_{split}_*.npy: expected file names [N] and a 0/1 matrix [N, L], found "
                        f"{files.dtype} {files.shape} and {matrix.dtype} {matrix.shape}.")
    names = np.char.decode(files, "utf-8") if files.dtype.kind == "S" else files
    return [str(name).replace("\\", "/") for name in names], matrix.astype(np.int8)
