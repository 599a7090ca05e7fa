"""Proves that every part of `lacuna bench state` measures equal work and ends in one JSON object with its ratios."""

from __future__ import annotations

import pytest

from lacuna.tools.cli import main
from tests.helpers.benches import bench

RATIOS = {"vs_bare_loop", "vs_bare_loop_histogram", "gather_scatter_vs_numpy", "quantize_us_per_row", "step_slowdown",
          "step_slowdown_waiting",
          "rss_growth", "rss_within_bound", "snapshot_seconds", "vs_best_peer", "vs_memmap"}
SHARDS, ROWS = 9, 40


def test_every_part_compares_equal_work():
    report, _ = bench("state", "--quick", "--shards", str(SHARDS), "--rows", str(ROWS), "--width", "20", "--rounds",
                      "2", "--steps", "4", "--step-ms", "1", "--samples", "400", "1200")
    assert set(report["ratios"]) == RATIOS
    assert report["checks"] == {"different_chunks": 0, "different_histograms": 0, "different_rows": 0,
                                "changed_by_steps": 0, "different_stores": 0}
    details = report["details"]
    assert details["snapshot_chunks"] == SHARDS * 2  # --quick: of two fields
    # The memory test fills a store and goes through it once: four fields, every chunk written twice.
    assert details["chunks_written"] == [2 * 4 * samples // ROWS for samples in (400, 1200)]
    peaks = details["rss_mb"]
    assert report["ratios"]["rss_growth"] == pytest.approx(peaks["large"] / peaks["small"], rel=0.02)
    assert report["ratios"]["rss_within_bound"] == float(max(peaks["small"], peaks["large"]) <= peaks["imports"]
                                                         + peaks["budget"] + 314)
    peers = details["peers"]
    assert set(peers) == {"lacuna", *details["versions"]}
    assert set(details["versions"]) | {p["name"] for p in details["not_run"]} == {"zarr", "zarrs", "tensorstore",
                                                                                 "icechunk", "memmap"}
    assert {name for name, found in peers.items() if not found["snapshot_kept"]} == {"memmap"}  # it has none
    # After a SIGKILL, a store without versions holds updates that the checkpoint does not know of.
    assert peers["lacuna"]["shards_ahead_of_snapshot"] == 0 < peers["zarr"]["shards_ahead_of_snapshot"]
    for key in ("vs_bare_loop", "vs_bare_loop_histogram"):
        assert len(details[key + "_mb_per_s"]) == 2, key


def test_one_part_alone(tmp_path):
    report, said = bench("state", "--only", "batch", "--rows", "30", "--width", "8", "--steps", "3", "--folder",
                         str(tmp_path))
    assert set(report["ratios"]) == {"gather_scatter_vs_numpy"}
    assert report["checks"] == {"different_rows": 0}
    assert "batch: " in said
    assert not list(tmp_path.iterdir()), "the test store was left behind"


@pytest.mark.parametrize(("options", "said"), [
    (["--rows", "0"], "--rows 0: give a number above 0"),
    (["--samples", "10", "2000"], "--samples 10 2000: give two numbers of at least one shard's rows (1000)"),
])
def test_bad_options_are_named(options, said, capsys):
    assert main(["bench", "state", *options]) == 2
    assert said in capsys.readouterr().err
