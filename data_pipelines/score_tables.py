"""Tables of scores made elsewhere (a vision-language model's, another run's): N samples × L classes, named by keys.

    .parquet   a column `key`, and one column per class (named as in the class list, or by class id) or one list column
               `scores`
    .npz       arrays `keys`, `scores` [N, L] and `classes`
    .npy       the scores alone; keys and classes come from text files, one a line
A table is read once, front to back, into a scratch file from which rows are then taken in the order of the shards.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.unpacking import check_archive, check_parquet
from lacuna.data_pipelines.index import ShardIndex

_ROWS = 4096  # of a Parquet file at a time


@dataclass
class ScoreTable:
    """`values` [N, L] is mapped from a file, so the table need not fit into memory."""

    path: str
    keys: list[str]
    classes: list[str]
    values: np.ndarray

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.dtype.kind not in "fiu":
            raise UserError(f"{self.path}: expected numbers [samples, classes], found {self.values.dtype} of shape "
                            f"{self.values.shape}.")
        for name, named, size in (("keys", self.keys, self.values.shape[0]),
                                  ("classes", self.classes, self.values.shape[1])):
            if len(named) != size:
                raise UserError(f"{self.path}: {len(named)} {name} for scores of shape {self.values.shape}.")

    def columns_for(self, index: ShardIndex, reorder: bool) -> np.ndarray | None:
        """Which column each class of the dataset is; None if they are in its order already."""
        known = index.class_ids if self.classes and set(self.classes) <= set(index.class_ids) else index.classes
        twice = next((name for i, name in enumerate(self.classes) if name in self.classes[:i]), None)
        if twice is not None:
            raise UserError(f"{self.path}: class {twice!r} twice.")
        lacking, foreign = (sorted(set(a) - set(b)) for a, b in ((known, self.classes), (self.classes, known)))
        if lacking or foreign:
            raise UserError(f"{self.path}: another class list than {index.url}: it lacks {_some(lacking)}, and has "
                            f"{_some(foreign)} that the dataset does not know. Name the columns by the classes of "
                            "index.json (or its class ids).")
        if self.classes == list(known):
            return None
        at = next(i for i, name in enumerate(known) if self.classes[i] != name)
        if not reorder:
            raise UserError(f"{self.path}: the dataset's classes in another order: column {at} is "
                            f"{self.classes[at]!r}, the dataset's class {at} is {known[at]!r}. If the names are right, "
                            "pass --reorder to put the columns into the dataset's order.")
        place = {name: i for i, name in enumerate(self.classes)}
        return np.array([place[name] for name in known])


def read_table(path: str, scratch: str, keys: str | None = None, classes: str | None = None) -> ScoreTable:
    """`scratch` is a folder for what has to be laid out anew; `keys` and `classes` are text files, one name a line."""
    kind = Path(path).suffix
    if kind not in _READERS:
        raise UserError(f"{path}: a table of scores is a .parquet, .npz or .npy file.")
    local = _local(path, scratch)
    try:
        found_keys, found_classes, values = _READERS[kind](local, path, scratch)
    except UserError:
        raise
    except Exception as error:  # zipfile, numpy and pyarrow raise many kinds for damaged bytes
        raise UserError(f"{path}: damaged, or no {kind} file ({type(error).__name__}: {error}).") from None
    key_list = _lines(keys) if keys else found_keys
    if key_list is None:
        raise UserError(f"{path}: which sample is which row? Pass --keys FILE with one sample key a line.")
    class_list = _lines(classes) if classes else found_classes
    if class_list is None:
        raise UserError(f"{path}: which class is which column? Pass --classes FILE with one class name a line.")
    return ScoreTable(path, key_list, class_list, values)


def _local(path: str, scratch: str) -> str:
    if storage.is_local(path):
        local = storage.local_path(path)
        if not Path(local).is_file():
            raise UserError(f"{path}: no such file.")
        return local
    target = str(Path(tempfile.mkdtemp(dir=scratch)) / Path(path).name)
    try:
        with storage.open_stream(path) as stream, open(target, "wb") as out:
            shutil.copyfileobj(stream, out, 8 << 20)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    return target


_Read = tuple[list[str] | None, list[str] | None, np.ndarray]


def _read_npy(local: str, path: str, scratch: str) -> _Read:
    return None, None, np.load(local, mmap_mode="r", allow_pickle=False)


def _read_npz(local: str, path: str, scratch: str) -> _Read:
    check_archive(local)
    try:
        with zipfile.ZipFile(local) as archive:
            scores = archive.extract("scores.npy", tempfile.mkdtemp(dir=scratch))
        with np.load(local, allow_pickle=False) as arrays:
            keys = arrays["keys"].astype(str).tolist()
            classes = arrays["classes"].astype(str).tolist() if "classes" in arrays.files else None
    except KeyError as error:
        raise UserError(f"{path}: expected the arrays 'keys', 'scores' and 'classes' ({error}).") from None
    return keys, classes, _read_npy(scores, path, scratch)[2]


def _read_parquet(local: str, path: str, scratch: str) -> _Read:
    import pyarrow as pa  # half a second that other commands need not pay
    import pyarrow.parquet as pq

    file = pq.ParquetFile(local)
    check_parquet(local, file.metadata)
    names = file.schema_arrow.names
    if "key" not in names:
        raise UserError(f"{path}: no column 'key'; it has {_some(names)}.")
    columns = [name for name in names if name != "key"]
    listed = columns == ["scores"] and not pa.types.is_floating(file.schema_arrow.field("scores").type)
    keys: list[str] = []
    out, width = Path(tempfile.mkdtemp(dir=scratch)) / "scores.f4", len(columns)
    with open(out, "wb") as target:
        for batch in file.iter_batches(_ROWS):
            keys += [str(key) for key in batch.column("key").to_pylist()]
            try:
                block = (np.stack([np.asarray(row, np.float32) for row in batch.column("scores").to_pylist()]) if listed
                         else np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in columns], axis=1))
                block = block.astype(np.float32)
            except (TypeError, ValueError) as error:
                raise UserError(f"{path}: its columns are not numbers of one length ({error}).") from None
            width = block.shape[1]
            block.tofile(target)
    count = len(keys)
    values = np.memmap(out, np.float32, "r", shape=(count, width)) if count * width else np.zeros((count, width))
    return keys, None if listed else columns, values


_READERS = {".npy": _read_npy, ".npz": _read_npz, ".parquet": _read_parquet}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}).") from None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:3])
    return (shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")) if names else "none"
