"""The real packages that read our exchange files, in a venv of their own: their dependencies are none of ours."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-exchange"
_PACKAGES = ("datasets", "pycocotools", "Pillow", "label-studio-sdk", "fiftyone")


def install() -> str | None:
    """Make the venv if it is not there; returns why that is impossible, or None."""
    python, done = VENV / "bin" / "python", VENV / ".installed"
    with open(ROOT / ".venv-exchange.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may want it at once
        have = done.exists() and done.read_text() == " ".join(_PACKAGES)  # others were wanted before
        for command in () if have else ([sys.executable, "-m", "venv", str(VENV)],
                                                 [str(python), "-m", "pip", "install", "--quiet", *_PACKAGES]):
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                return f"{' '.join(command[1:])}: {made.stderr.strip().splitlines()[-1:]}"
        done.write_text(" ".join(_PACKAGES))
    return None


def outside(code: str, *words: str) -> dict:
    """What a script that prints one JSON object says in that venv; the test is skipped where it cannot be made."""
    reason = install()
    if reason:
        pytest.skip(f"no annotation packages: {reason}")
    made = subprocess.run([str(VENV / "bin" / "python"), "-c", code, *words], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout.splitlines()[-1])
