"""One thread at a time reads the header of a .npy or .npz file, and one that was seen before is not parsed again.

NumPy parses headers with `ast.literal_eval`, and Python 3.11 counts the recursion depth of all threads in one number:
two threads in it at once may fail with "SystemError: AST constructor recursion depth mismatch", which would look like a
damaged file.
"""

from __future__ import annotations

import functools
import io
import math
import threading
import tokenize
import zipfile
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
_LOCK = threading.Lock()
_TRIES = 4
_VERSION_1 = np.lib.format.magic(1, 0)


def alone(read: Callable[[], T]) -> T:
    """What `read` gives, read again if a parser that does not come through here got in its way.

    A damaged header is a ValueError, whatever NumPy's parser of old headers makes of it.
    """
    for left in reversed(range(_TRIES)):
        try:
            with _LOCK:
                return read()
        except (tokenize.TokenError, SyntaxError) as error:
            raise ValueError(f"the header is damaged: {error}") from None
        except SystemError:
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


class Layout(NamedTuple):
    """What the header of a .npy file says, if it is of the usual kind."""

    start: int  # the first byte of the numbers
    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool

    def fits(self, size: int) -> bool:
        """Whether a file of this size is whole."""
        return min(self.shape, default=0) >= 0 and size == self.start + math.prod(self.shape) * self.dtype.itemsize


def layout(data: bytes) -> Layout | None:
    """None: only NumPy itself can read it, or say what is wrong with it."""
    if not data.startswith(_VERSION_1):
        return None
    start = 10 + int.from_bytes(data[8:10], "little")
    found = _parsed(data[:start])
    return found if found is not None and found.fits(len(data)) else None


@functools.lru_cache(1024)
def _parsed(header: bytes) -> Layout | None:
    shape, fortran, dtype = alone(lambda: np.lib.format.read_array_header_1_0(io.BytesIO(header[8:])))
    return None if dtype.hasobject else Layout(len(header), dtype, shape, fortran)


def unpacked(data: bytes, names: Iterable[str] | None = None, most: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, or those of the given names (KeyError if one lacks); at most `most` bytes in all."""
    if not data.startswith(b"PK"):
        raise ValueError("not an .npz file")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if most is not None and size > most:
            raise ValueError(f"{size:,} bytes when unpacked, at most {most:,} are allowed")
        listed = {name.removesuffix(".npy"): name for name in archive.namelist()}
        return {name: _array(archive.read(listed[name]), name) for name in (listed if names is None else names)}


def _array(data: bytes, name: str) -> np.ndarray:
    known = layout(data)
    if known is not None:
        flat = np.frombuffer(bytearray(data), known.dtype, offset=known.start)
        return flat.reshape(known.shape, order="F" if known.fortran else "C")
    found = alone(lambda: np.load(io.BytesIO(data), allow_pickle=False))
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{name} is not an array")
    return found
