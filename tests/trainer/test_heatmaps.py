"""Heatmap cells belong to places in the uncropped image, through any crop and flip."""

import pytest
import torch
import torch.nn.functional as F

from lacuna.trainer.heatmaps import read_crop, write_crop

FULL = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
KEEP, FLIP = torch.tensor([False]), torch.tensor([True])


def random_boxes(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    size = 0.5 + 0.5 * torch.rand(count, 2, generator=g)
    corner = torch.rand(count, 2, generator=g) * (1 - size)
    return torch.cat([corner, corner + size], 1), torch.rand(count, generator=g) < 0.5


def test_a_constant_map_is_a_fixed_point():
    boxes, flips = random_boxes(50)
    heat = torch.full((50, 3, 14, 14), 0.37)
    assert torch.allclose(read_crop(heat, boxes, flips, 7), torch.tensor(0.37), atol=1e-6)
    values, seen = write_crop(torch.full((50, 3, 7, 7), 0.37), boxes, flips, 14)
    assert torch.allclose(values, torch.tensor(0.37), atol=1e-6)
    assert seen.any()


def test_the_full_image_is_read_as_exact_two_by_two_means():
    heat = torch.rand(1, 2, 14, 14)
    means = heat.reshape(1, 2, 7, 2, 7, 2).mean((3, 5))
    assert torch.allclose(read_crop(heat, FULL, KEEP, 7), means, atol=1e-6)
    assert torch.allclose(read_crop(heat, FULL, FLIP, 7), means.flip(-1), atol=1e-6)


def test_a_peak_is_found_again_where_it_was_written():
    """A delta in the score map of one crop, written to the heatmap, is read back at the same place of the image."""
    boxes, flips = random_boxes(200, seed=1)
    side, grid = 28, 14
    g = torch.Generator().manual_seed(2)
    for b in range(200):
        row, column = (int(i) for i in torch.randint(2, grid - 2, (2,), generator=g))
        scores = torch.zeros(1, 1, grid, grid)
        scores[0, 0, row, column] = 1
        box, flip = boxes[b : b + 1], flips[b : b + 1]
        values, seen = write_crop(scores, box, flip, side)
        heat = torch.where(seen, values, torch.zeros(()))[0, 0]
        mass = heat.sum()
        centre = (torch.arange(side) + 0.5) / side
        found_y, found_x = (heat.sum(1) * centre).sum() / mass, (heat.sum(0) * centre).sum() / mass
        u = (column + 0.5) / grid
        x = box[0, 0] + (1 - u if flip else u) * (box[0, 2] - box[0, 0])
        y = box[0, 1] + (row + 0.5) / grid * (box[0, 3] - box[0, 1])
        assert abs(found_x - x) < 1 / side
        assert abs(found_y - y) < 1 / side
        again = read_crop(heat[None, None], box, flip, grid)[0, 0]
        assert divmod(int(again.argmax()), grid) == (row, column)


def naive_points(boxes, flips, grid, side):
    """The same places by PyTorch's own operations: of a crop's cells in the image, and of heatmap cells in the crop."""
    part, cells = ((torch.arange(n) + 0.5) / n for n in (grid, side))
    x = boxes[:, :1] + torch.where(flips[:, None], 1 - part, part) * (boxes[:, 2:3] - boxes[:, :1])
    y = boxes[:, 1:2] + part * (boxes[:, 3:] - boxes[:, 1:2])
    u, v = ((cells - boxes[:, a, None]) / (boxes[:, a + 2] - boxes[:, a])[:, None] for a in (0, 1))
    seen = ((v >= 0) & (v <= 1))[:, :, None] & ((u >= 0) & (u <= 1))[:, None, :]
    return (x, y), (torch.where(flips[:, None], 1 - u, u), v), seen[:, None]


def naive_sample(maps, x, y):
    places = torch.stack([(2 * x - 1)[:, None, :].expand(-1, y.shape[1], -1),
                          (2 * y - 1)[:, :, None].expand(-1, -1, x.shape[1])], dim=-1)
    return F.grid_sample(maps, places, mode="bilinear", padding_mode="border", align_corners=False)


@pytest.mark.parametrize("grid", [5, 7, 12, 14])
def test_the_places_are_those_of_float32_bit_for_bit(grid):
    boxes, flips = random_boxes(100, seed=grid)
    heat, scores = torch.rand(100, 2, 2 * grid, 2 * grid), torch.rand(100, 2, grid, grid)
    there, back, mask = naive_points(boxes, flips, grid, 2 * grid)
    assert torch.equal(read_crop(heat, boxes, flips, grid), naive_sample(heat, *there))
    values, seen = write_crop(scores, boxes, flips, 2 * grid)
    assert torch.equal(values, naive_sample(scores, *back))
    assert torch.equal(seen, mask)


def test_cells_outside_the_crop_are_not_seen():
    box = torch.tensor([[0.25, 0.5, 0.75, 1.0]])
    _, seen = write_crop(torch.rand(1, 1, 4, 4), box, KEEP, 8)
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[4:8, 2:6] = True
    assert torch.equal(seen[0, 0], expected)


@pytest.mark.parametrize("flip", [KEEP, FLIP])
def test_naive_sampling_agrees(flip):
    """By formula, cell by cell."""
    box = torch.tensor([[0.1, 0.2, 0.8, 0.95]])
    heat, side, grid = torch.rand(1, 1, 10, 10), 10, 5
    got = read_crop(heat, box, flip, grid)[0, 0]
    for v in range(grid):
        for u in range(grid):
            part = (u + 0.5) / grid
            x = box[0, 0] + (1 - part if flip else part) * (box[0, 2] - box[0, 0])
            y = box[0, 1] + (v + 0.5) / grid * (box[0, 3] - box[0, 1])
            fx, fy = float(x) * side - 0.5, float(y) * side - 0.5
            x0, y0 = int(fx // 1), int(fy // 1)
            total = 0.0
            for dy in (0, 1):
                for dx in (0, 1):
                    weight = (1 - abs(fx - (x0 + dx))) * (1 - abs(fy - (y0 + dy)))
                    yy, xx = min(max(y0 + dy, 0), side - 1), min(max(x0 + dx, 0), side - 1)
                    total += weight * float(heat[0, 0, yy, xx])
            assert float(got[v, u]) == pytest.approx(total, abs=1e-5)
