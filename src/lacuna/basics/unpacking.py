"""Files that are small on disk and large in memory: what they claim to unpack to is looked at first."""

from __future__ import annotations

import os
import zipfile
from typing import Any

from lacuna.basics.errors import UserError

_ALWAYS = 1 << 30  # bytes that any file may unpack to
_TIMES = 50  # of its own size that a larger one may
_VALUE = 8  # bytes of a number of a Parquet column, at most


def check_archive(path: str) -> None:
    """Of an .npz file; one that is no archive is left to its reader."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return
    _check(path, size)


def check_parquet(path: str, metadata: Any) -> None:
    """`metadata` is that of pyarrow's ParquetFile: columns of one repeated value take no room in the file.

    Not by the columns' own metadata: where those are damaged, asking for them ends the process.
    """
    _check(path, _VALUE * metadata.num_rows * metadata.num_columns)


def _check(path: str, size: int) -> None:
    packed = os.path.getsize(path)
    if size > max(_ALWAYS, _TIMES * packed):
        raise UserError(f"{path}: {packed:,} bytes that unpack to {size:,}, more than {_TIMES} times as many. If it is "
                        "yours, save it without compression (numpy.savez, or a .npy file).")
