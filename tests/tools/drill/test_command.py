"""The fault drill: every fault is noticed, nothing is lost or repeated, and the state is the undisturbed run's."""

from __future__ import annotations

import json

import pytest

from lacuna.tools.cli import main
from lacuna.tools.drill import Outcome, summary
from lacuna.tools.drill.faults import FAULTS


def drill(capsys, *arguments: str) -> dict:
    code = main(["drill", "--json", *arguments])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["passed"] is (code == 0)
    return report


def check(report: dict, faults: list[str], rounds: int) -> None:
    assert report["rounds"] == rounds
    assert {line["fault"] for line in report["faults"]} == set(faults)
    for line in report["faults"]:
        assert (line["lost_samples"], line["duplicated_updates"], line["state_equal"]) == (0, 0, True), line


def test_a_short_drill(capsys):
    """A full disk and a torn checkpoint have tests of their own (tests/trainer); the long form has every fault."""
    faults = ["kill", "freeze", "chunk"]
    check(drill(capsys, "--faults", *faults), faults, 3)


@pytest.mark.long
def test_fifty_rounds(capsys):
    check(drill(capsys, "--rounds", "50", "--seed", "1"), list(FAULTS), 50)


def test_a_difference_is_not_overlooked():
    lines = summary([Outcome("kill", 1.0, 3, True), Outcome("kill", 2.0, 9, False, lost=2),
                     Outcome("chunk", 5.0, 6, True)])
    assert lines[0]["fault"] == "kill"
    assert (lines[0]["rounds"], lines[0]["detected_after_seconds"], lines[0]["lost_samples"]) == (2, 2.0, 2)
    assert not lines[0]["state_equal"]
    assert lines[1]["state_equal"]


def test_mistakes_are_named(capsys, tmp_path):
    (tmp_path / "something").write_text("x")
    for arguments, message in ((["--faults", "flood"], "--faults flood: there are kill"),
                               (["--ranks", "3"], "--ranks 3"), (["--folder", str(tmp_path)], "not empty")):
        assert main(["drill", *arguments]) == 2
        assert message in capsys.readouterr().err
