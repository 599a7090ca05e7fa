"""Proves that `lacuna bench decode` ends in one JSON object with both ratios and every contender's rate."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from lacuna.tools.cli import main


def test_last_line_is_json_with_the_ratios():
    # A process of its own: the ImageFolder workers are forked, which is safe only without other threads.
    options = ["--quick", "--images", "24", "--rounds", "1", "--workers", "1", "--batch", "8"]
    environment = {key: value for key, value in os.environ.items() if key != "LACUNA_EVAL_DATA"}
    done = subprocess.run([sys.executable, "-m", "lacuna.tools.cli", "bench", "decode", *options], capture_output=True,
                          text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["bench"], report["quick"]) == ("decode", True)
    assert set(report["ratios"]) == {"vs_bare_loop", "vs_imagefolder"}
    assert set(report["images_per_second"]) == {"lacuna", "bare", "imagefolder"}
    assert all(value > 0 for value in [*report["ratios"].values(), *report["images_per_second"].values()])
    assert (report["epoch"], report["rounds"], report["workers"]) == (24, 1, 1)
    assert 50_000 < report["mean_bytes"] < 110_000


def test_bad_options_are_named(capsys):
    assert main(["bench", "decode", "--batch", "7"]) == 2
    assert "--batch" in capsys.readouterr().err
