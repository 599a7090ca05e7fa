"""`bench start` measures commands and launches beside what torch and DeepSpeed need by themselves."""

from __future__ import annotations

from tests.helpers.benches import bench, is_quotient


def test_a_turn():
    report, _ = bench("start", "--quick")
    seconds, ratios = report["seconds"], report["ratios"]
    commands = [value for name, value in seconds.items() if name.startswith("lacuna_")]
    assert set(seconds) == {"import_torch", "lacuna_methods", "lacuna_suggest", "bare_one_rank", "bare_two_ranks",
                            "one_rank", "two_ranks"}
    assert all(value > 0 for value in seconds.values())
    assert is_quotient(ratios["commands_vs_torch"], max(commands), seconds["import_torch"], 2)
    for said in ("one_rank", "two_ranks"):
        assert is_quotient(ratios[f"{said}_vs_bare"], seconds[said], seconds[f"bare_{said}"], 2)
