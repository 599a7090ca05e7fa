"""Pre-extracted features for the "linear on fixed features" protocol: a .npy [N, D] and the labels of its rows.

Labels: a .npy matrix [N, L], or a table as the `tsv` reader reads it with one line a row (its first column is the key).
In a matrix 1 is positive, and with `--zeros negative` (default) 0 is negative and -1 unknown; with `--zeros unknown`
(the observed matrices of Cole et al.) 0 is unknown and -1 negative.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import UNLISTED_WORDS
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.base import ClassNames, Dataset, Sample, load_array, read_class_list
from lacuna.data_pipelines.readers.tsv import table_rows

_BLOCK_ENTRIES = 1 << 24  # of a label matrix at once


def configure(group) -> None:
    group.add_argument("--features", required=True, metavar="FILE", help=".npy array [N, D] of floats")
    group.add_argument("--labels", required=True, metavar="FILE", help=".npy matrix [N, L], or a table")
    group.add_argument("--classes", metavar="FILE", help="class list; a matrix without one gets numbers as names")
    group.add_argument("--zeros", choices=sorted(UNLISTED_WORDS), default="negative",
                       help="what 0 means in a label matrix (default: negative)")
    group.add_argument("--unlisted", choices=sorted(UNLISTED_WORDS), default="unknown",
                       help="what a class in neither list of a table is (default: unknown)")
    group.add_argument("--split", default="train", help="name to record (default: train)")


def read(features: str, labels: str, classes: str | None = None, zeros: str = "negative", unlisted: str = "unknown",
         split: str = "train") -> Dataset:
    array = load_array(features)
    if array.ndim != 2 or array.dtype.kind != "f":
        raise UserError(f"{features}: {array.dtype} array of shape {array.shape}, expected floats [N, D].")
    names, class_ids = read_class_list(classes) if classes else ([], [])
    keys: Sequence[str]
    if labels.endswith(".npy"):
        sparse, width = matrix_labels(labels, zeros)
        names = names or [str(c) for c in range(width)]
        if len(names) != width:
            raise UserError(f"{classes}: {len(names)} classes, but {labels} has {width} columns.")
        keys = [f"{row:08d}" for row in range(len(sparse))]
    else:
        if not names:
            raise UserError(f"--labels {labels} is a table: give its class list with --classes.")
        named, positives, negatives = [], [], []
        for key, pos, neg, _ in table_rows(labels, split, ClassNames(names, class_ids)):
            named.append(key.replace(".", "_"))
            positives.append(pos)
            negatives.append(neg)
        keys, sparse = named, SparseLabels.from_lists(positives, negatives, UNLISTED_WORDS[unlisted])
    if len(keys) != len(array):
        raise UserError(f"{labels}: labels of {len(keys):,} rows, but {features} has {len(array):,}. "
                        "Give matching files.")
    source = {"reader": "features", "features": features, "labels": labels}
    return Dataset(names, FeatureSamples(features, keys), sparse, split, class_ids, kind="feature", source=source)


def matrix_labels(path: str, zeros: str) -> tuple[SparseLabels, int]:
    """(labels, number of classes) from a matrix of 1, 0 and -1."""
    matrix = load_array(path)
    if matrix.ndim != 2:
        raise UserError(f"{path}: shape {matrix.shape}, expected [N, L].")
    height = max(1, _BLOCK_ENTRIES // max(1, matrix.shape[1]))
    blocks = range(0, len(matrix), height)
    minus = NEGATIVE if zeros == "unknown" else UNKNOWN
    some_unknown = zeros == "unknown"
    for start in blocks:
        block = matrix[start : start + height]
        odd = np.argwhere((block != 1) & (block != 0) & (block != -1))
        if len(odd):
            row, column = odd[0]
            raise UserError(f"{path}: row {start + row}, column {column} is {block[row, column]}; legal: 1, 0, -1.")
        some_unknown = some_unknown or bool((block == -1).any())
    unlisted = UNKNOWN if some_unknown else NEGATIVE
    parts = []
    for start in blocks:
        block = matrix[start : start + height]
        ternary = np.full(block.shape, UNLISTED_WORDS[zeros], dtype=np.int8)
        ternary[block == 1] = POSITIVE
        ternary[block == -1] = minus
        parts.append(SparseLabels.from_dense(ternary, unlisted))
    return SparseLabels.joined(parts, unlisted), matrix.shape[1]


class FeatureSamples(Sequence):
    """Made when they are asked for: a million of them would take as much memory as their features."""

    def __init__(self, path: str, keys: Sequence[str]):
        self.path, self.keys = path, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, row):
        return Sample(self.keys[row], FeatureRow(self.path, int(row)), "npy")


@dataclass(frozen=True)
class FeatureRow:
    """One row of the feature array as the bytes of a .npy file."""

    path: str
    row: int

    def read(self) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(_opened(self.path)[self.row]), allow_pickle=False)
        return buffer.getvalue()

    def __str__(self) -> str:
        return f"{self.path} row {self.row}"


@lru_cache(maxsize=4)
def _opened(path: str) -> np.ndarray:
    return load_array(path)
