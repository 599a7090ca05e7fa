"""Proves that the recorded box and flip say where every pixel came from, and that draws depend on the sample alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F

from lacuna.data_pipelines.augment import CROPS, FULL_BOX, Augment, sample_rng

SIZE = 32


def coordinates(height: int, width: int) -> torch.Tensor:
    """An image whose first two channels are x and y, from 0 at one border to 255 at the other."""
    x = (torch.arange(width) + 0.5) / width * 255
    y = (torch.arange(height) + 0.5) / height * 255
    planes = [x.expand(height, width), y[:, None].expand(height, width), torch.full((height, width), 128.0)]
    return torch.stack(planes).round().to(torch.uint8)


def noise(height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8))


def expected_coordinates(box, flipped: bool) -> tuple[np.ndarray, np.ndarray]:
    """x and y in [0, 1] of the uncropped image at the centres of the SIZE output pixels, by the recorded geometry."""
    x0, y0, x1, y1 = box
    centres = (np.arange(SIZE) + 0.5) / SIZE
    x, y = x0 + (x1 - x0) * centres, y0 + (y1 - y0) * centres
    return (x[::-1] if flipped else x), y


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("shape", [(100, 140), (375, 500), (64, 64), (300, 90)])
def test_recorded_geometry_tells_where_pixels_came_from(crop, shape):
    image, seen = coordinates(*shape), set()
    for row in range(12):
        augment = Augment(SIZE, crop=crop, flip=True, scale=(0.2, 1.0))
        pixels, box, flipped = augment(image, sample_rng(1, 0, 0, row))
        x, y = expected_coordinates(box, flipped)
        inside = slice(2, -2)  # at the borders the resizing filter is cut off, which pulls values inwards
        # Two grey levels: rounding of the ramp and of the resized pixels.
        assert np.abs(pixels[0, SIZE // 2].numpy() / 255 - x)[inside].max() < 2 / 255
        assert np.abs(pixels[1, :, SIZE // 2].numpy() / 255 - y)[inside].max() < 2 / 255
        seen.add((box, flipped))
    assert {flipped for _, flipped in seen} == ({False} if crop == "same" else {True, False})
    boxes = len({box for box, _ in seen})
    assert boxes > 6 if crop == "random_resized" else boxes == 1


def test_same_sample_same_pixels_on_any_thread():
    augment = Augment(SIZE, crop="random_resized", flip=True, randaugment=2, cutout=0.5)
    images = [noise(50, 70, seed) for seed in range(6)]

    def make(job: tuple[int, int]):
        epoch, row = job
        pixels, box, flipped = augment(images[row], sample_rng(3, epoch, 2, row))
        return pixels, box, flipped

    jobs = [(epoch, row) for epoch in range(4) for row in range(6)]
    alone = [make(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(make, jobs[::-1]))[::-1]
    for (a, box_a, flip_a), (b, box_b, flip_b) in zip(alone, together, strict=True):
        assert torch.equal(a, b)
        assert (box_a, flip_a) == (box_b, flip_b)


def test_every_coordinate_of_a_sample_changes_its_draws():
    def draws(*key: int) -> list[float]:
        rng = sample_rng(*key)
        return [rng.random() for _ in range(3)]

    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({tuple(draws(*key)) for key in keys}) == len(keys)
    assert draws(1, 2, 3, 4) == draws(1, 2, 3, 4)


def test_draws_are_uniform_and_independent():
    values = np.array([[(rng := sample_rng(0, 0, 0, row)).random(), rng.random(), rng.random()]
                       for row in range(20_000)])
    counts = np.histogramdd(values, bins=(4, 4, 4), range=[(0, 1)] * 3)[0]
    expected = len(values) / counts.size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 120  # 63 degrees of freedom: 120 has a probability of 2e-5


def test_squash_is_torchvisions_resize_and_has_the_full_box():
    image = noise(90, 61)
    for picture in (image, image.permute(1, 2, 0).contiguous().permute(2, 0, 1)):  # planar, and as decoders give it
        pixels, box, flipped = Augment(SIZE)(picture, sample_rng(0, 0, 0, 0))
        assert torch.equal(pixels, F.resize(image, [SIZE, SIZE], antialias=True))
        assert (box, flipped) == (FULL_BOX, False)


def test_an_image_of_the_right_size_is_left_alone():
    image = noise(SIZE, SIZE)
    assert torch.equal(Augment(SIZE)(image, sample_rng(0, 0, 0, 0))[0], image)


def test_center_takes_the_middle_square():
    image = coordinates(200, 400)
    pixels, box, _ = Augment(SIZE, crop="center")(image, sample_rng(0, 0, 0, 0))
    assert box == pytest.approx((112 / 400, 12 / 200, 287 / 400, 187 / 200), abs=1 / 200)
    assert torch.equal(pixels, F.resize(image[:, 12:187, 112:287], [SIZE, SIZE], antialias=True))


def test_pixels_go_into_the_given_place_of_a_batch():
    augment = Augment(SIZE, crop="random_resized", flip=True, randaugment=1, cutout=0.3)
    batch = torch.zeros((3, 3, SIZE, SIZE), dtype=torch.uint8)
    for row in range(8):
        given, _, _ = augment(noise(40, 40), sample_rng(0, 0, 0, row), batch[1])
        assert given.data_ptr() == batch[1].data_ptr()
        assert torch.equal(batch[1], augment(noise(40, 40), sample_rng(0, 0, 0, row))[0])
    assert not batch[0].any()
    assert not batch[2].any()


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2000), (2000, 1), (2, 3), (3, 900), (5, 4), (7, 7)])
def test_extreme_shapes(crop, shape):
    image = noise(*shape)
    for row in range(20):
        pixels, (x0, y0, x1, y1), _ = Augment(SIZE, crop=crop, flip=True)(image, sample_rng(0, 0, 0, row))
        assert pixels.shape == (3, SIZE, SIZE)
        assert 0 <= x0 < x1 <= 1
        assert 0 <= y0 < y1 <= 1
        assert pixels.float().mean() == pytest.approx(crop_mean(image, (x0, y0, x1, y1)), abs=30)


def crop_mean(image: torch.Tensor, box) -> float:
    rows, columns = image.shape[-2:]
    x0, y0, x1, y1 = box
    inside = image[:, round(y0 * rows) : round(y1 * rows), round(x0 * columns) : round(x1 * columns)]
    return float(inside.float().mean())


def test_random_boxes_have_the_asked_area_and_shape():
    image = torch.zeros((3, 200, 300), dtype=torch.uint8)
    augment = Augment(8, crop="random_resized", scale=(0.3, 0.6))
    areas, ratios = [], []
    for row in range(400):
        _, (x0, y0, x1, y1), _ = augment(image, sample_rng(0, 0, 0, row))
        areas.append((x1 - x0) * (y1 - y0))
        ratios.append((x1 - x0) * 300 / ((y1 - y0) * 200))
    assert 0.29 < min(areas) < 0.33
    assert 0.57 < max(areas) < 0.61
    assert 0.74 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.35


def test_cutout_paints_one_rectangle_of_one_colour():
    image = torch.full((3, SIZE, SIZE), 77, dtype=torch.uint8)
    sizes = []
    for row in range(30):
        pixels, box, _ = Augment(SIZE, cutout=0.5)(image, sample_rng(0, 0, 0, row))
        painted = (pixels != 77).any(0)
        ys, xs = torch.nonzero(painted, as_tuple=True)
        inside = pixels[:, ys.min() : ys.max() + 1, xs.min() : xs.max() + 1].reshape(3, -1)
        assert (inside == inside[:, :1]).all()
        assert box == FULL_BOX
        sizes.append(inside.shape[1])
    assert max(sizes) <= (SIZE // 2) ** 2
    assert min(sizes) < max(sizes)  # clipped at the border


def test_randaugment_changes_pixels_and_says_that_it_may_move_them():
    image = F.resize(noise(6, 6), [SIZE, SIZE])

    def made(**settings) -> list[torch.Tensor]:
        return [Augment(SIZE, randaugment=1, **settings)(image, sample_rng(0, 0, 0, row))[0] for row in range(60)]

    changed, weak = made(), made(randaugment_magnitude=1)
    assert len({pixels.numpy().tobytes() for pixels in changed}) > 12  # of 14 operations, most with two signs
    assert all(pixels.dtype == torch.uint8 and pixels.shape == image.shape for pixels in changed)
    strength = [torch.stack(some).int().sub(image.int()).abs().float().mean() for some in (weak, changed)]
    assert strength[0] < strength[1] / 2
    assert Augment(SIZE, randaugment=1).moves_pixels_unrecorded
    assert not Augment(SIZE, cutout=0.5).moves_pixels_unrecorded
