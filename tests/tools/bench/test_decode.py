"""Proves that `lacuna bench decode` lets every contender deliver the same images and divides its own rates."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from lacuna.tools.bench import decode
from lacuna.tools.cli import main
from tests.helpers.benches import bench


def test_contenders_deliver_the_same_number_and_ratios_are_those_of_the_rates():
    report, _ = bench("decode", "--quick", "--images", "24", "--rounds", "1", "--workers", "1", "--batch", "8")
    assert (report["epoch"], report["rounds"], report["workers"]) == (24, 1, 1)
    assert report["delivered"] == {"lacuna": 24, "bare": 24, "imagefolder": 24}
    rates = report["images_per_second"]
    assert set(rates) == set(report["delivered"])
    assert report["ratios"] == {  # of one round, so no medians come between
        "vs_bare_loop": pytest.approx(rates["lacuna"] / rates["bare"], rel=0.02, abs=0.001),
        "vs_imagefolder": pytest.approx(rates["lacuna"] / rates["imagefolder"], rel=0.02, abs=0.001)}
    assert 50_000 < report["mean_bytes"] < 110_000


def test_both_decoders_of_the_bare_loop_see_the_picture_that_pil_sees():
    photo = decode.encode(decode.scene(np.random.default_rng(3)))
    expected = np.asarray(Image.open(io.BytesIO(photo)).convert("RGB")).astype(int)
    assert expected.shape == (decode.HEIGHT, decode.WIDTH, 3)
    for decoder in (decode._by_simplejpeg, decode._by_torchvision):
        found = decoder(photo).permute(1, 2, 0).numpy().astype(int)
        assert np.abs(found - expected).mean() < 1, decoder.__name__


def test_the_boxes_are_those_of_the_scale():
    areas = np.array([h * w for _, _, h, w in decode.random_boxes(200)]) / (decode.HEIGHT * decode.WIDTH)
    assert areas.min() >= decode.SCALE[0] - 0.01
    assert areas.max() <= 1
    assert areas.std() > 0.1


def test_bad_options_are_named(capsys):
    assert main(["bench", "decode", "--batch", "7"]) == 2
    assert "--batch" in capsys.readouterr().err
