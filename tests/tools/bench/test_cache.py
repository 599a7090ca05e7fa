"""Proves that `lacuna bench cache` times epochs of the product's loop, and that its ratios are those of its times."""

from __future__ import annotations

from lacuna.tools.cli import main
from tests.helpers.benches import bench, is_quotient


def test_ratios_are_those_of_the_epochs():
    report, _ = bench("cache", "--quick", "--photos", "32", "--rounds", "1")
    ratios, seconds = report["ratios"], report["seconds"]
    assert set(ratios) == {"epoch_speedup", "epoch_speedup_maps", "fill_overhead", "fill_overhead_maps"}
    assert report["photos"] == 32
    for ending in ("", "_maps"):
        plain, fill, read = (seconds[f"{kind}{ending}"] for kind in ("plain", "fill", "read"))
        assert is_quotient(ratios[f"epoch_speedup{ending}"], plain, read, 2)
        assert is_quotient(ratios[f"fill_overhead{ending}"], fill, plain, 3)


def test_bad_options_are_named(capsys, monkeypatch):
    monkeypatch.delenv("LACUNA_EVAL_DATA", raising=False)
    assert main(["bench", "cache", "--photos", "3"]) == 2
    assert "--photos 3" in capsys.readouterr().err
    assert main(["bench", "cache"]) == 2
    assert "--data: give the folder that holds coco_photos/" in capsys.readouterr().err
