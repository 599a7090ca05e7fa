"""Fault points: named places where a test can have the process killed, to prove that a crash there loses nothing.

`LACUNA_FAULT=name:3` sends SIGKILL to this process when the point `name` is reached for the third time.
"""

from __future__ import annotations

import os
import signal
import threading

POINTS = (
    "create.array", "create.before_group", "launch.before_entry", "launch.entry", "orphans.some_removed",
    "chunk.before_write", "chunk.half_written", "chunk.written", "prepare.spilled", "prepare.synced",
    "commit.before_manifest", "commit.manifest", "commit.entry", "collect.entry_removed", "collect.some_removed",
    "collect.removed",
)
_armed, _, _count = os.environ.get("LACUNA_FAULT", "").partition(":")
_left = int(_count or 1)
_lock = threading.Lock()
if _armed and _armed not in POINTS:
    raise ValueError(f"LACUNA_FAULT names {_armed!r}; legal points: {', '.join(POINTS)}")


def is_armed(name: str) -> bool:
    """Whether the next arrival at this point is the deadly one (a half-written object must be prepared before it)."""
    return name == _armed and _left <= 1


def point(name: str) -> None:
    """Do nothing, unless a test armed this point: then die without any clean-up."""
    if name != _armed:
        return
    global _left
    with _lock:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
