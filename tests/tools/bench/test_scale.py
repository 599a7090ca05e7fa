"""Proves that `lacuna bench scale` runs equal jobs, alone and as two ranks, and that its ratio is that of its rates."""

from __future__ import annotations

import pytest

from lacuna.tools.cli import main
from tests.helpers.benches import bench


def test_the_ratio_is_that_of_the_rates():
    report, _ = bench("scale", "--quick", "--turns", "1", "--batch", "4", "--images", "64", "--backbone", "lacuna:tiny")
    one, other = report["where"]["one_rank_twice"]
    both = report["where"]["two_ranks"]
    assert one["first_losses"] == other["first_losses"]  # the same training twice
    assert len(set(one["first_losses"])) == 3  # which learns
    assert both["first_losses"] != one["first_losses"]  # twice the batch
    for job, batch in ((one, 4), (other, 4), (both, 8)):
        assert job["steps"] >= 5
        assert job["step_ms"] == pytest.approx(1e3 * batch / job["samples_per_second"], rel=0.01, abs=0.06)
        spent = job["data_wait_ms"] + job["state_wait_ms"] + job["compute_and_exchange_ms"]
        assert spent == pytest.approx(job["step_ms"], abs=0.12)
    alone = one["samples_per_second"] + other["samples_per_second"]
    assert report["ratios"] == {"two_ranks": pytest.approx(both["samples_per_second"] / alone, rel=0.01, abs=0.001)}
    single = report["where"]["one_rank_alone"]["samples_per_second"]
    assert report["ceiling"] == {
        "two_independent_vs_one_alone": pytest.approx(alone / single, rel=0.01, abs=0.001),
        "two_ranks_vs_one_alone": pytest.approx(both["samples_per_second"] / single, rel=0.01, abs=0.001)}
    longer = both["step_ms"] - (one["step_ms"] + other["step_ms"]) / 2
    assert report["where"]["exchange_and_waiting_ms"] == pytest.approx(longer, abs=0.11)
    assert report["batch_per_rank"] == 4


def test_bad_options_are_named(capsys):
    assert main(["bench", "scale", "--images", "10"]) == 2
    assert "--images 10" in capsys.readouterr().err
