"""Other processes as /proc shows them: who descends from whom, who still lives."""

from __future__ import annotations

import contextlib
import os


def lives(pid: int) -> bool:
    """A zombie does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in (b"Z", b"X")


def descendants(pid: int) -> list[int]:
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    parents = {number: int(fields[1]) for number in numbers if (fields := _stat(number))}
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def _stat(pid: int) -> list[bytes] | None:
    """Fields after the name, which may hold anything: state, parent, …"""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as f:
        return f.read().rpartition(b")")[2].split()
    return None
