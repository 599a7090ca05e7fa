"""Prediction files of any model, read with suspicion: every number that cannot be right is named, none is repaired.

  scores.npy                      float [N, L]: every class, in class order
  classes.npy scores.npy          int and float [N, k]: the k best classes of every row, in any order
  file.npz                        arrays `scores`, and `classes` for the k best; optionally `keys`
  file.parquet                    columns `scores` (list of float), and `classes` (list of int); optionally `key`
Only numbers are loaded, never pickled objects. Legend: N rows, L classes, k given classes of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.unpacking import check_archive, check_parquet

BATCH_ROWS = 512
_FORMS = "scores.npy, classes.npy scores.npy, a .npz with `scores` (and `classes`), or a .parquet with such columns"


@dataclass(frozen=True)
class Predictions:
    where: str
    scores: np.ndarray  # float32 or float16 [N, L], or [N, k] with classes
    classes: np.ndarray | None = None  # int64 [N, k]
    keys: list[str] | None = None
    rounded: bool = False  # float64 scores were rounded to float32

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def truncated(self) -> bool:
        """Not every class has a score: the others count as 0."""
        return self.classes is not None

    def dense(self, rows: np.ndarray, classes: int, absent: float = 0.0) -> np.ndarray:
        """float32 [rows, L] with `absent` for classes that a row does not list."""
        if self.classes is None:
            return np.asarray(self.scores[rows], np.float32)
        out = np.full((len(rows), classes), absent, np.float32)
        np.put_along_axis(out, self.classes[rows], self.scores[rows].astype(np.float32), axis=1)
        return out

    def in_order_of(self, order: np.ndarray) -> Predictions:
        """The same predictions with class id c renamed to order[c]."""
        if self.classes is not None:
            return replace(self, classes=order[self.classes])
        scores = np.empty_like(self.scores)
        scores[:, order] = self.scores
        return replace(self, scores=scores)

    def check(self, classes: int) -> None:
        """Against the number of classes of the labels."""
        if self.classes is None:
            if self.scores.shape[1] != classes:
                raise UserError(f"{self.where}: {self.scores.shape[1]} scores a row, the labels have {classes} "
                                "classes. If these are the k best, give their ids as well: classes.npy scores.npy.")
            return
        low, high = int(self.classes.min(initial=0)), int(self.classes.max(initial=0))
        if low < 0 or high >= classes:
            row = int(np.argmax(((self.classes < 0) | (self.classes >= classes)).any(axis=1)))
            raise UserError(f"{self.where}: row {row} has class id {high if high >= classes else low}, the labels have "
                            f"ids 0..{classes - 1}.")


def read_predictions(paths: list[str]) -> Predictions:
    where = " ".join(paths)
    try:
        return _read(where, paths)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"--predictions {error.filename}: no such file.") from None
    except Exception as error:  # zipfile, numpy and pyarrow raise many kinds for damaged bytes
        raise UserError(f"--predictions {where}: damaged, or not what its ending says ({type(error).__name__}: "
                        f"{error}). Expected {_FORMS}.") from None


def _read(where: str, paths: list[str]) -> Predictions:
    if len(paths) == 2 and all(path.endswith(".npy") for path in paths):
        first, second = (np.load(path, allow_pickle=False) for path in paths)
        if first.dtype.kind == "f" and second.dtype.kind in "iu":
            first, second = second, first
        return _checked(where, second, first, None)
    if len(paths) == 1 and paths[0].endswith(".npy"):
        return _checked(where, np.load(paths[0], allow_pickle=False), None, None)
    if len(paths) == 1 and paths[0].endswith(".npz"):
        check_archive(paths[0])
        with np.load(paths[0], allow_pickle=False) as archive:
            return _checked(where, *(archive.get(name) for name in ("scores", "classes", "keys")))
    if len(paths) == 1 and paths[0].endswith(".parquet"):
        return _checked(where, *_parquet(paths[0]))
    raise UserError(f"--predictions {where}: expected {_FORMS}.")


def _checked(where: str, scores: np.ndarray | None, classes: np.ndarray | None,
             keys: np.ndarray | list[str] | None) -> Predictions:
    if scores is None:
        raise UserError(f"{where}: has no `scores`. Expected {_FORMS}.")
    if scores.ndim != 2 or scores.dtype.kind != "f":
        raise UserError(f"{where}: scores are {scores.dtype} {list(scores.shape)}; expected floating-point numbers "
                        "[rows, classes].")
    if classes is not None and (classes.shape != scores.shape or classes.dtype.kind not in "iu"):
        raise UserError(f"{where}: classes are {classes.dtype} {list(classes.shape)}, scores {list(scores.shape)}; "
                        "expected integers of the same shape.")
    if not np.isfinite(scores).all():
        row, column = np.argwhere(~np.isfinite(scores))[0]
        raise UserError(f"{where}: the score in row {row}, column {column} is {scores[row, column]}. Every score must "
                        "be a finite number.")
    names = None if keys is None else [key.decode() if isinstance(key, bytes) else str(key) for key in keys]
    if names is not None and len(names) != len(scores):
        raise UserError(f"{where}: {len(names)} keys for {len(scores)} rows.")
    rounded = scores.dtype == np.float64
    small = scores.astype(np.float32) if rounded else scores
    if classes is None:
        return Predictions(where, small, None, names, rounded)
    ids = classes.astype(np.int64)
    in_order = np.sort(ids, axis=1)
    double = (in_order[:, 1:] == in_order[:, :-1]).any(axis=1)
    if double.any():
        raise UserError(f"{where}: row {int(np.argmax(double))} lists a class twice.")
    if scores.size and scores.min() < 0:
        row = int(np.argwhere(scores < 0)[0][0])
        raise UserError(f"{where}: row {row} has the negative score {scores.min(axis=1)[row]}. Classes that a row does "
                        "not list count as 0, so give probabilities, or the logits of all classes.")
    return Predictions(where, small, ids, names, rounded)


def _parquet(path: str) -> tuple[np.ndarray | None, np.ndarray | None, list[str] | None]:
    import pyarrow as pa
    from pyarrow import parquet

    check_parquet(path, parquet.read_metadata(path))
    table = parquet.read_table(path)

    def matrix(name: str) -> np.ndarray | None:
        if name not in table.column_names:
            return None
        column = table[name].combine_chunks()
        if not isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
            raise UserError(f"{path}: column {name!r} is {column.type}; expected lists of numbers.")
        lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
        flat = column.flatten()
        if len(lengths) > 1 or flat.null_count or column.null_count:
            raise UserError(f"{path}: lists of column {name!r} have different lengths, or lack values.")
        return flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)

    keys = next((table[name].to_pylist() for name in ("key", "keys") if name in table.column_names), None)
    return matrix("scores"), matrix("classes"), keys


def batches(count: int) -> Iterator[np.ndarray]:
    """Row numbers 0..count-1 in pieces."""
    for start in range(0, count, BATCH_ROWS):
        yield np.arange(start, min(start + BATCH_ROWS, count))
