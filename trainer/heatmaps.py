"""Heatmap geometry: a cell is a region of the *uncropped* image; score maps belong to the crop that the model saw.

Legend: B batch, K maps of a sample, W heatmap side, G score-map side. Boxes are (x0, y0, x1, y1) in [0, 1].
Both directions are one batched bilinear sample; on a constant map the round trip is the identity. The host knows boxes
and flips, so it works out where to sample: on an accelerator that is one copy instead of dozens of tiny operations.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from lacuna.trainer.on_device.uploads import to_device


def read_crop(heat: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, side: int) -> torch.Tensor:
    """[B, K, W, W] → [B, K, G, G]: what the heatmaps say about the cells of the crop (boxes and flips of the host)."""
    ends = boxes.numpy()
    return _sample(heat, _centres(ends[:, 0::2], side, flips.numpy()), _centres(ends[:, 1::2], side))


def write_crop(scores: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor,
               side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, K, G, G] → (values [B, K, W, W] at the heatmap's cells, mask [B, 1, W, W] of cells whose centre was seen)."""
    ends, cells = boxes.numpy(), _middles(side)
    x, seen_x = _inside(cells, ends[:, 0], ends[:, 2])
    y, seen_y = _inside(cells, ends[:, 1], ends[:, 3])
    x = np.where(flips.numpy()[:, None], 1 - x, x)
    return _sample(scores, x, y), to_device((seen_y[:, :, None] & seen_x[:, None, :])[:, None], scores.device)


def _middles(side: int) -> np.ndarray:
    """float32 [side]: where cells have their centres."""
    return (np.arange(side, dtype=np.float32) + np.float32(0.5)) / np.float32(side)


def _centres(ends: np.ndarray, side: int, flips: np.ndarray | None = None) -> np.ndarray:
    """[B, G]: image coordinates of the crop's cell centres along one axis."""
    part = _middles(side)[None]
    if flips is not None:
        part = np.where(flips[:, None], 1 - part, part)
    return ends[:, :1] + part * (ends[:, 1:] - ends[:, :1])


def _inside(cells: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B, W]: the heatmap's cell centres in the crop's own coordinates, and whether they lie in it."""
    part = (cells[None] - low[:, None]) / (high - low)[:, None]
    return part, (part >= 0) & (part <= 1)


def _sample(maps: torch.Tensor, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    """Bilinear at the points (y_i, x_j) in [0, 1], clamped at the border."""
    grid = np.empty((len(x), y.shape[1], x.shape[1], 2), np.float32)
    grid[..., 0], grid[..., 1] = (2 * x - 1)[:, None, :], (2 * y - 1)[:, :, None]
    points = to_device(grid, maps.device).to(maps.dtype)
    return F.grid_sample(maps, points, mode="bilinear", padding_mode="border", align_corners=False)
