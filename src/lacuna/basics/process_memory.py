"""Memory of a process as the kernel counts it now: ru_maxrss would include a parent's, which an exec inherits."""

from __future__ import annotations

import contextlib
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    return _status(pid, "VmRSS")


def peak_resident_bytes(pid: int | str = "self") -> int:
    return _status(pid, "VmHWM")


def _status(pid: int | str, field: str) -> int:
    """0 where the process has ended, or where the system has no /proc."""
    with contextlib.suppress(OSError):
        for line in Path("/proc", str(pid), "status").read_text(encoding="ascii").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
