"""One thread at a time reads the header of a .npy or .npz file.

NumPy parses headers with `ast.literal_eval`, and Python 3.11 counts the recursion depth of all threads in one number:
two threads in it at once may fail with "SystemError: AST constructor recursion depth mismatch", which would look like a
damaged file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LOCK = threading.Lock()
_TRIES = 4


def alone(read: Callable[[], T]) -> T:
    """What `read` gives, read again if a parser that does not come through here got in its way."""
    for left in reversed(range(_TRIES)):
        try:
            with _LOCK:
                return read()
        except SystemError:
            if not left:
                raise
    raise AssertionError("the last try returns or raises")
