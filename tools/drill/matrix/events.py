"""What a rank does to storage, counted in memory that its parent sees; at a chosen one of them the rank is killed.

Every call is two events, before and after it: between any two of them lies a moment at which a power cut leaves other
files behind.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lacuna.basics import storage

_WATCHED: list[tuple[ModuleType, tuple[str, ...]]] = [
    (storage, ("write_atomic", "write_new", "create_exclusive", "remove", "remove_tree", "upload", "sync")),
    (os, ("replace", "link", "fsync")),
]
_LABEL = 120  # bytes of a rank's last event, after its number
_RECORD = 8 + _LABEL


class Events:
    """Shared by a launch's ranks and their parent; made before they are forked."""

    def __init__(self, ranks: int):
        self.ranks, self.memory = ranks, mmap.mmap(-1, ranks * _RECORD)

    def count(self, rank: int) -> int:
        return int.from_bytes(self.memory[rank * _RECORD : rank * _RECORD + 8], "little")

    def last(self, rank: int) -> str:
        """As in "after create_exclusive 00000004.json"."""
        at = rank * _RECORD + 8
        return self.memory[at : at + _LABEL].rstrip(b"\0").decode(errors="replace")

    def watch(self, rank: int, deadly: int, everybody: bool) -> None:
        """In the rank: from here on its calls are counted; at number `deadly` (0: never) it dies, or all of them do."""
        lock, seen = threading.Lock(), [0]

        def happen(label: str) -> None:
            with lock:
                seen[0] += 1
                at = rank * _RECORD
                self.memory[at : at + _RECORD] = seen[0].to_bytes(8, "little") + label.encode()[:_LABEL].ljust(
                    _LABEL, b"\0")
                if seen[0] == deadly:
                    (os.killpg if everybody else os.kill)(0 if everybody else os.getpid(), signal.SIGKILL)

        for module, names in _WATCHED:
            for name in names:
                setattr(module, name, _counted(getattr(module, name), name, happen))


def _counted(call: Callable[..., Any], name: str, happen: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(*arguments: Any, **named: Any) -> Any:
        what = f"{name} {_short(arguments)}".rstrip()
        happen(f"before {what}")
        done = call(*arguments, **named)
        happen(f"after {what}")
        return done

    return counted


def _short(arguments: tuple) -> str:
    """The file's name and its folder's, of what was last given as a path."""
    paths = [argument for argument in arguments if isinstance(argument, str)]
    return "/".join(paths[-1].rsplit("/", 2)[-2:]) if paths else ""
