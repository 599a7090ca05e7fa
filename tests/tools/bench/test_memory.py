"""Proves that `lacuna bench memory` trains at every size, updates its scores rightly, and divides what it measured."""

from __future__ import annotations

import pytest

from lacuna.tools.cli import main
from tests.helpers.benches import bench

STEPS = 60


def test_growth_is_that_of_the_sizes():
    report, _ = bench("memory", "--quick", "--sizes", "2000", "6000", "--classes", "40", "--steps", str(STEPS),
                      "--share", "0.0001")
    small, large = report["sizes"]["2000"], report["sizes"]["6000"]
    assert set(report["sizes"]) == {"2000", "6000"}
    assert min(small["steps"], large["steps"]) >= STEPS
    assert min(small["peak_mb"], large["peak_mb"]) > 50  # an interpreter with torch, at least
    assert report["ratios"] == {
        "rss_growth": pytest.approx(large["peak_mb"] / small["peak_mb"], abs=0.001),
        "time_per_sample_growth": pytest.approx(large["us_per_sample"] / small["us_per_sample"], abs=0.0006)}
    scores = report["openimages"]
    assert scores["wrong_rows"] == 0
    assert scores["share"] == round(4 * 500 / 9_000_000, 5)  # never fewer than four shards
    assert scores["dense_gb"] == 86.4
    assert 0 < scores["disk_gb"] <= scores["dense_gb"] * 1.1
    whole_hours = scores["us_per_sample"] * 9_000_000 / 1e6 / 3600
    assert scores["epoch_hours_one_rank"] == pytest.approx(whole_hours, rel=0.01, abs=0.006)


@pytest.mark.parametrize(("options", "said"), [
    (["--sizes", "6000", "2000"], "--sizes 6000 2000"), (["--sizes", "9000"], "--sizes 9000"),
    (["--steps", "3"], "--steps 3"),
])
def test_bad_options_are_named(options, said, capsys):
    assert main(["bench", "memory", *options]) == 2
    assert said in capsys.readouterr().err
