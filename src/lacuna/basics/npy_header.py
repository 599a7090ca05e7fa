"""One thread at a time reads the header of a .npy or .npz file.

NumPy parses headers with `ast.literal_eval`, and Python 3.11 counts the recursion depth of all threads in one number:
two threads in it at once may fail with "SystemError: AST constructor recursion depth mismatch", which would look like a
damaged file.
"""

from __future__ import annotations

import io
import threading
import tokenize
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

T = TypeVar("T")
_LOCK = threading.Lock()
_TRIES = 4


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


def unpacked(data: bytes, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, or those of the given names (KeyError if one lacks)."""
    def read() -> dict[str, np.ndarray]:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in (archive.files if names is None else names)}

    found = alone(read)
    for name, array in found.items():
        if not isinstance(array, np.ndarray):  # without the mark of an array NumPy gives the bare bytes
            raise ValueError(f"{name} is not an array")
    return found
