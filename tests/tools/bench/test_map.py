"""Proves that `lacuna bench map` ends in one JSON object with its four ratios, exact AP, and names bad options."""

from __future__ import annotations

import json

import pytest

from lacuna.tools.cli import main


def test_last_line_is_json_with_the_ratios(capsys):
    assert main(["bench", "map", "--quick", "--dense", "3000x40", "--partial", "400x800"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["bench"], report["quick"]) == ("map", True)
    assert set(report["ratios"]) == {"vs_sklearn", "partial_vs_sklearn", "max_abs_diff", "memory_vs_scores"}
    assert report["ratios"]["max_abs_diff"] <= 1e-9
    assert report["dense"]["sklearn_classes_timed"] == 10


@pytest.mark.parametrize(("argv", "message"), [
    (["bench", "mop"], "no benchmark 'mop'; there are: "),
    (["bench", "map", "--dense", "3000"], "--dense '3000'"),
])
def test_bad_options_are_named(capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err
