"""Proves that `lacuna bench loss` ends in one JSON object with its ratios, and names bad options."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lacuna.tools.cli import main


def test_last_line_is_json_with_the_ratios():
    """In a process of its own: the benchmark joins a process group of one."""
    command = [sys.executable, "-m", "lacuna.tools.cli", "bench", "loss", "--quick", "--batch", "3", "--classes", "500",
               "--top", "7", "--repeats", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["bench"], report["quick"], report["repeats"]) == ("loss", True, 2)
    assert set(report["ratios"]) == {"csl_vs_bce", "csl_batch_vs_bce", "csl_vs_float_bce", "topk_vs_ours"}
    assert all(value > 0 for value in report["ratios"].values())


@pytest.mark.parametrize("flag", ["--batch", "--classes", "--top"])
def test_bad_options_are_named(flag, capsys):
    assert main(["bench", "loss", flag, "0"]) == 2
    assert f"{flag} 0" in capsys.readouterr().err
