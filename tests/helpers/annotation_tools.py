"""The real packages that read our exchange files, in a venv of their own: their dependencies are none of ours."""

from __future__ import annotations

import json
import subprocess

from tests.helpers.own_venv import own_venv


def outside(code: str, *words: str) -> dict:
    """What a script that prints one JSON object says in that venv; the test is skipped where it cannot be made."""
    python = own_venv("exchange", "datasets", "pycocotools", "Pillow", "label-studio-sdk", "fiftyone")
    made = subprocess.run([str(python), "-c", code, *words], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout.splitlines()[-1])
