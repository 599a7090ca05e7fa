"""Runs a benchmark as a user does, at a size that tests can afford, and reads its last line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.helpers.launching import environment


def bench(name: str, *options: str, timeout: float = 900) -> tuple[dict[str, Any], str]:
    """(the JSON object, all that was printed). In a process of its own: some benches join a process group or fork."""
    variables = environment()
    variables.pop("LACUNA_EVAL_DATA", None)  # the same data on every machine
    done = subprocess.run([sys.executable, "-m", "lacuna.tools.cli", "bench", name, *options], capture_output=True,
                          text=True, timeout=timeout, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["bench"] == name
    assert report["quick"] == ("--quick" in options)
    return report, done.stdout


def is_quotient(ratio: float, above: float, below: float, digits: int) -> bool:
    """Whether a ratio of so many digits can be above ÷ below, when both were rounded to three decimals."""
    half, rounding = 0.5 * 10**-digits + 1e-9, 0.0005
    lowest = max(0.0, above - rounding) / (below + rounding) - half
    highest = (above + rounding) / (below - rounding) + half if below > rounding else float("inf")
    return lowest <= ratio <= highest
