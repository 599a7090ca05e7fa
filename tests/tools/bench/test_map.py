"""Proves that `lacuna bench map` finds the AP of others, divides its own times, measures memory, names bad options."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lacuna.tools.cli import main


def test_last_line_is_json_with_the_ratios(capsys):
    assert main(["bench", "map", "--quick", "--dense", "3000x40", "--partial", "400x800"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["bench"], report["quick"]) == ("map", True)
    assert {p["name"] for p in report["not_run"]} | set(report["versions"]) == {"torchmetrics"}
    others = ["sklearn", *report["versions"]]
    assert set(report["ratios"]) == {"max_abs_diff", "memory_vs_scores", *(f"{case}vs_{other}" for other in others
                                                                           for case in ("", "partial_"))}
    assert report["ratios"]["max_abs_diff"] <= 1e-9
    dense, partial = report["dense"], report["partial"]
    assert (dense["rows"], dense["classes"], dense["classes_timed"]) == (3000, 40, 10)
    assert (partial["rows"], partial["classes"], partial["classes_timed"]) == (400, 800, 200)
    assert report["ratios"]["max_abs_diff"] == max(dense["max_abs_diff"], partial["max_abs_diff"])
    for case, part in (("", dense), ("partial_", partial)):
        for other in others:
            quotient = part[f"{other}_seconds"] / part["seconds"]
            assert report["ratios"][f"{case}vs_{other}"] == pytest.approx(quotient, rel=0.02, abs=0.006)
        assert part.get("torchmetrics_diff", 0) < 1e-5  # it computes in float32
    assert report["ratios"]["memory_vs_scores"] > 0.5  # the collector keeps a copy of what it was given


PEAK = """
import numpy as np
from lacuna.tools.bench.map import peak_extra_bytes

def call():
    np.ones(40 << 20, np.uint8)  # freed before the next
    np.ones(60 << 20, np.uint8)

print(peak_extra_bytes(call))
"""


def test_the_peak_of_a_call_is_what_it_held_at_once():
    """In a process of its own: what other tests left running in this one would count, too."""
    found = int(subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True).stdout)
    assert found >= 60 << 20
    if os.access("/proc/self/clear_refs", os.W_OK):  # elsewhere a peak from before the call counts too
        assert found < 90 << 20


@pytest.mark.parametrize(("argv", "message"), [
    (["bench", "mop"], "no benchmark 'mop'; there are: "),
    (["bench", "map", "--dense", "3000"], "--dense '3000'"),
])
def test_bad_options_are_named(capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err
