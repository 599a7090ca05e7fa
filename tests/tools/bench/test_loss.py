"""Proves that `lacuna bench loss` compares equal work, divides the times it reports, and names bad options."""

from __future__ import annotations

import pytest

from lacuna.tools.cli import main
from tests.helpers.benches import bench, is_quotient

RATIOS = {"csl_vs_bce": ("csl", "bce"), "csl_batch_vs_bce": ("csl_batch", "bce"),
          "csl_vs_float_bce": ("csl", "float_bce"), "selection_vs_bce": ("selection", "bce"),
          "selection_wide_vs_bce": ("selection_wide", "bce"), "topk_vs_ours": ("topk", "ours")}


def test_contenders_agree_and_ratios_are_those_of_the_times():
    report, _ = bench("loss", "--quick", "--batch", "3", "--classes", "500", "--top", "7", "--repeats", "2")
    assert (report["batch"], report["classes"], report["top"], report["repeats"]) == (3, 500, 7, 2)
    assert report["differences"] == {"bce_gradients": 0.0, "selected_entries": 0}
    assert report["selection"]["nodes"] > 1
    assert max(report["selection"]["error"], report["selection"]["error_wide"]) < 1e-4
    assert report["selection"]["expected_positives"] == 8
    times = report["milliseconds"]
    assert set(report["ratios"]) == set(RATIOS)
    for name, (above, below) in RATIOS.items():
        assert is_quotient(report["ratios"][name], times[above], times[below], 2), name


@pytest.mark.parametrize("flag", ["--batch", "--classes", "--top"])
def test_bad_options_are_named(flag, capsys):
    assert main(["bench", "loss", flag, "0"]) == 2
    assert f"{flag} 0" in capsys.readouterr().err
