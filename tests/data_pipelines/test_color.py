"""Proves that changes of colour equal torchvision's for the same factors, stay in their bounds and move no pixel."""

from __future__ import annotations

import numpy as np
import torch
import torchvision.transforms.v2.functional as F

from lacuna.data_pipelines.augment import Augment, sample_rng
from lacuna.data_pipelines.color import blur, grayscale, jitter

SIZE = 24
CHANGES = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def photo(seed: int = 0) -> torch.Tensor:
    small = np.random.default_rng(seed).integers(0, 256, (3, 5, 5), dtype=np.uint8)
    return F.resize(torch.from_numpy(small), [SIZE, SIZE])


def test_jitter_is_torchvisions_for_the_drawn_order_and_factors():
    strength, orders = (0.4, 0.3, 0.2, 0.1), set()
    for row in range(40):
        rng = sample_rng(0, 0, 0, row)
        keys = [rng.random() for _ in range(4)]
        order = tuple(sorted(range(4), key=keys.__getitem__))
        expected = photo(row)
        for which in order:
            draw = 2 * rng.random() - 1
            factor = draw * strength[which] if which == 3 else 1 + draw * strength[which]
            assert abs(factor - (which != 3)) <= strength[which]
            expected = CHANGES[which](expected, factor)
        assert torch.equal(jitter(photo(row), strength, sample_rng(0, 0, 0, row)), expected)
        orders.add(order)
    assert len(orders) > 12  # of 24


def test_no_strength_no_change_and_full_strength_reaches_black():
    assert torch.equal(jitter(photo(), (0, 0, 0, 0), sample_rng(0, 0, 0, 0)), photo())
    means = [jitter(photo(), (1.0, 0, 0, 0), sample_rng(0, 0, 0, row)).float().mean() for row in range(200)]
    assert min(means) < 8
    assert max(means) > photo().float().mean() * 1.3


def test_grayscale_and_blur():
    grey = grayscale(photo())
    assert grey.dtype == torch.uint8
    assert (grey == grey[:1]).all()
    blurred = {float(blur(photo(), sample_rng(0, 0, 0, row)).float().std()) for row in range(20)}
    assert len(blurred) > 5  # the width is drawn
    assert max(blurred) < float(photo().float().std())


def test_chances_are_kept():
    image = photo()

    def changed(**settings) -> float:
        augment = Augment(SIZE, **settings)
        return np.mean([not torch.equal(augment(image, sample_rng(1, 0, 0, row))[0], image) for row in range(400)])

    assert 0.7 < changed(color_jitter=(0.5, 0.5, 0.5, 0.5), color_chance=0.8) < 0.9
    assert 0.14 < changed(grayscale=0.2) < 0.26
    assert 0.24 < changed(blur=0.3) < 0.36
    assert changed() == 0


def test_colours_move_no_pixel():
    augment = Augment(SIZE, color_jitter=(0.8, 0.8, 0.8, 0.2), grayscale=0.2, blur=0.2)
    assert not augment.moves_pixels_unrecorded
    half = torch.zeros((3, SIZE, SIZE), dtype=torch.uint8)
    half[:, :, SIZE // 2 :] = torch.tensor([200, 120, 60], dtype=torch.uint8)[:, None, None]
    for row in range(50):
        pixels, box, flipped = augment(half, sample_rng(0, 0, 0, row))
        for side in (slice(0, SIZE // 2 - 2), slice(SIZE // 2 + 2, None)):
            colours = pixels[:, :, side].reshape(3, -1)
            assert (colours == colours[:, :1]).all()
        assert (box, flipped) == ((0, 0, 1, 1), False)
