"""Proves that `lacuna bench decode` lets every contender deliver the same images and divides its own rates."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from lacuna.tools.bench.decode import RATIO, SCALE, SMALL, contenders, pictures
from lacuna.tools.cli import main
from tests.helpers.benches import bench

PEERS = {"torchvision", "webdataset", "spdl", "dali"}


def test_contenders_deliver_the_same_and_ratios_are_those_of_the_rates():
    report, _ = bench("decode", "--quick", "--images", "16", "--rounds", "1", "--workers", "1", "--batch", "8")
    for case, extra in (("small", set()), ("large", {"exact"})):
        part = report[case]
        assert set(part["versions"]) | {p["name"] for p in part["not_run"]} == PEERS
        assert {"torchvision", "webdataset"} <= set(part["versions"])  # which we depend on
        kept = set(part["images_per_second"]) - {"lacuna", "bare"} - extra
        assert len(kept) == 2  # --quick: the two fastest
        assert kept <= set(part["versions"])
        assert set(part["delivered"].values()) == {16 if case == "small" else 8}
        for name, ratio in part["vs_each"].items():  # of one turn, so no medians come between
            rates = part["images_per_second"]
            assert ratio == pytest.approx(rates["lacuna"] / rates[name], rel=0.02, abs=0.001)
        assert part["best_peer"] == max(kept, key=lambda name: part["images_per_second"][name])
        assert part["spread"][part["best_peer"]] == pytest.approx([part["vs_each"][part["best_peer"]]] * 2)
    small, large = report["small"], report["large"]
    assert report["ratios"] == {
        "vs_bare_loop": small["vs_each"]["bare"], "vs_best_peer": small["vs_each"][small["best_peer"]],
        "vs_bare_loop_large": large["vs_each"]["bare"], "vs_best_peer_large": large["vs_each"][large["best_peer"]],
        "scaled_vs_exact_large": large["vs_each"]["exact"]}
    assert set(small["same_work"]) == set(small["versions"])
    assert max(small["same_work"].values()) < 2  # levels of 255, of the average picture
    assert 50_000 < small["mean_bytes"] < 110_000


def test_both_decoders_of_the_bare_loop_see_the_picture_that_pil_sees():
    photo = pictures.encode(pictures.scene(np.random.default_rng(3), SMALL))
    expected = np.asarray(Image.open(io.BytesIO(photo)).convert("RGB")).astype(int)
    assert expected.shape == (*SMALL, 3)
    for decoder in (contenders.by_simplejpeg, contenders.by_torchvision):
        found = decoder(photo).permute(1, 2, 0).numpy().astype(int)
        assert np.abs(found - expected).mean() < 1, decoder.__name__


def test_the_boxes_are_those_of_the_scale():
    areas = np.array([h * w for _, _, h, w in pictures.random_boxes(200, SMALL, SCALE, RATIO)]) / np.prod(SMALL)
    assert areas.min() >= SCALE[0] - 0.01
    assert areas.max() <= 1
    assert areas.std() > 0.1


def test_bad_options_are_named(capsys):
    assert main(["bench", "decode", "--batch", "7"]) == 2
    assert "--batch" in capsys.readouterr().err
