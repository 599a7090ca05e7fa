"""Packages in a venv of their own, beside the project's: their dependencies are none of ours."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def own_venv(name: str, *packages: str, on_top: bool = False) -> Path:
    """Its interpreter; made if it is not there. The test is skipped where that is impossible.

    `on_top`: the packages of this environment can be imported there, too."""
    venv = ROOT / f".venv-{name}"
    python, done = venv / "bin" / "python", venv / ".installed"
    with open(ROOT / f".venv-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may want it at once
        if done.exists() and done.read_text() == " ".join(packages):  # others may have been wanted before
            return python
        _run(name, [sys.executable, "-m", "venv", str(venv)])
        _run(name, [str(python), "-m", "pip", "install", "--quiet", *packages])
        if on_top:  # after pip, which would take them for installed
            site = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
            (site / "zz_below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        done.write_text(" ".join(packages))
    return python


def _run(name: str, command: list[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no .venv-{name}: {' '.join(command[1:])}: {made.stderr.strip().splitlines()[-1:]}")
