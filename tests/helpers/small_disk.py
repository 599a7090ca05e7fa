"""A disk of a few megabytes that a test can fill, where root may mount one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[Path]:
    """Eight megabytes that can be filled; needs root."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True,
                          text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
        while f.write(b"x" * 65536):
            pass
    assert shutil.disk_usage(folder).free == 0
