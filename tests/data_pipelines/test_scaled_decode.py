"""Proves that a JPEG decoded at a part of its size gives the same crop through fewer pixels, and only where it may."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.decode import decode_image, decode_scaled
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.trainer.config.files import load_config, read_table, shipped
from lacuna.trainer.config.sections import parse_config

SIZE = 32


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth, with nothing symmetric about it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 95} | options if kind == "JPEG" else options))
    return buffer.getvalue()


def made(data: bytes, row: int, *, scaled: bool, strong: Augment | None = None) -> tuple[torch.Tensor, tuple, bool]:
    maker = SampleMaker(Augment(SIZE, crop="random_resized", flip=True, scaled_decode=scaled), 3, 1, strong=strong)
    views = maker.empty(1, False)
    return views, *maker(data, 0, row, views[:, 0])


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("allowed", "factor"), [(1.9, 1), (2.0, 2), (3.9, 2), (4.5, 4), (50.0, 8)])
def test_the_image_is_the_full_one_made_smaller(orientation, allowed, factor):
    """At odd sizes, turned as EXIF says; the size that `shrink` is asked with, and that is told, is the one as seen."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(141, 203), exif=exif)
    exact, asked = decode_image(data), []

    def shrink(rows: int, columns: int) -> float:
        asked.append((rows, columns))
        return allowed

    image, full = decode_scaled(data, shrink)
    assert asked == [tuple(exact.shape[1:])] == [full[:2]]
    assert full.factor == factor
    assert image.shape == (3, -(-full.rows // factor), -(-full.columns // factor))
    # One decoded pixel is the mean of factor × factor pixels as they are stored; those past the border are made up.
    turned, flips = (orientation > 4, {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation, []))
    stored, small = ((i.flip(flips).mT if turned else i.flip(flips)).float() for i in (exact, image))
    rows, columns = (side // factor for side in stored.shape[1:])
    means = stored[:, : rows * factor, : columns * factor].reshape(3, rows, factor, columns, factor).mean((2, 4))
    assert (means - small[:, :rows, :columns]).abs().mean() < 1


def test_boxes_flips_and_pixels_are_those_of_the_full_image():
    """Large photo: the same draws, and pixels less than a third of one beside where they were."""
    data, differences = encoded(photo(300, 420)), []
    for row in range(40):
        exact, box, flipped = made(data, row, scaled=False)
        scaled, scaled_box, scaled_flip = made(data, row, scaled=True)
        assert (box, flipped) == (scaled_box, scaled_flip)
        moved = max((exact.float().roll(1, axis) - exact.float())[..., 1:, 1:].abs().mean().item() for axis in (-1, -2))
        differences.append(((exact.float() - scaled.float()).abs().mean().item() - 0.5) / moved)  # 0.5: rounding
    assert 0.01 < max(differences) < 0.3


def test_a_small_image_stays_exact():
    """No crop of it is twice the size that is asked for."""
    data = encoded(photo(60, 63))
    for row in range(10):
        assert torch.equal(made(data, row, scaled=False)[0], made(data, row, scaled=True)[0])


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_other_formats_are_decoded_in_full(kind):
    data = encoded(photo(300, 420), kind)
    assert torch.equal(made(data, 1, scaled=False)[0], made(data, 1, scaled=True)[0])


def test_a_second_view_with_a_crop_of_its_own_needs_all_pixels():
    data = encoded(photo(300, 420))
    own = Augment(SIZE, crop="random_resized", scale=(0.05, 0.1))
    assert torch.equal(made(data, 1, scaled=False, strong=own)[0], made(data, 1, scaled=True, strong=own)[0])
    same = Augment(SIZE, crop="same", cutout=0.5)
    assert not torch.equal(made(data, 1, scaled=False, strong=same)[0], made(data, 1, scaled=True, strong=same)[0])


def test_it_is_the_default_and_a_part_of_what_a_run_is():
    body = {"name": "x", "data": {"train": {"url": "unused"}, "augment": {"crop": "random_resized"}},
            "model": {"backbone": "lacuna:tiny"}, "phases": [{"name": "a", "epochs": 1, "batch": 8, "lr": 0.1}]}
    default = parse_config(body, "x")
    assert default.data.augment.scaled_decode
    body["data"]["augment"]["scaled_decode"] = False
    exact = parse_config(body, "x")
    assert exact.fingerprint() != default.fingerprint()
    assert default.differences(exact) == ["data.augment.scaled_decode: True → False"]


def test_papers_protocols_with_random_crops_decode_in_full():
    cropped = []
    for name in shipped():
        table = read_table(name)
        if table is not None:  # one row of each: rows differ in method and dataset
            augment = load_config(f"{name}:{next(iter(table.rows))}", []).data.augment
            if augment.crop == "random_resized":
                cropped.append(name)
                assert not augment.scaled_decode, name
    assert {"scpnet", "verelst"} <= set(cropped)
