"""Proves that `lacuna bench tax` runs all methods on the same batches and that its ratios are those of its times."""

from __future__ import annotations

from lacuna.tools.cli import main
from tests.helpers.benches import bench, is_quotient

METHODS = ("role", "en_cl", "en_scl")


def test_all_methods_see_the_same_batches():
    report, _ = bench("tax", "--batch", "4", "--classes", "20", "--images", "64", "--backbone", "lacuna:tiny",
                      "--seconds", "0.1")
    assert set(report["ratios"]) == {*METHODS, *(f"{name}_state" for name in METHODS)}
    assert set(report["ratios_of_means"]) == set(METHODS)
    assert set(report["batches"]) == {"an", *METHODS}
    assert len(set(report["batches"].values())) == 1, report["batches"]
    assert len(set(report["steps"].values())) == 1
    assert report["steps"]["an"] >= 5
    assert report["budget_over_state"] == dict.fromkeys(METHODS, 0.25)
    whole, inside = report["step_ms"], report["state_ms"]
    assert inside["an"] == 0.0
    for name in METHODS:
        assert 0 < inside[name] < whole[name], name
        assert is_quotient(report["ratios"][name], whole[name], whole["an"], 3), name
        assert is_quotient(report["ratios"][f"{name}_state"], whole["an"] + inside[name], whole["an"], 3), name


def test_bad_options_are_named(capsys):
    assert main(["bench", "tax", "--images", "3"]) == 2
    assert "--images 3" in capsys.readouterr().err
