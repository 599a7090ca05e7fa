"""Heatmap geometry: a cell is a region of the *uncropped* image; score maps belong to the crop that the model saw.

Legend: B batch, K maps of a sample, W heatmap side, G score-map side. Boxes are (x0, y0, x1, y1) in [0, 1].
Both directions are one batched bilinear sample; on a constant map the round trip is the identity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def read_crop(heat: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, side: int) -> torch.Tensor:
    """[B, K, W, W] → [B, K, G, G]: what the heatmaps say about the cells of the crop."""
    return _sample(heat, _centres(boxes[:, 0::2], side, flips), _centres(boxes[:, 1::2], side))


def write_crop(scores: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor,
               side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, K, G, G] → (values [B, K, W, W] at the heatmap's cells, mask [B, 1, W, W] of cells whose centre was seen)."""
    cells = (torch.arange(side, device=scores.device) + 0.5) / side
    x, seen_x = _inside(cells, boxes[:, 0], boxes[:, 2])
    y, seen_y = _inside(cells, boxes[:, 1], boxes[:, 3])
    x = torch.where(flips[:, None], 1 - x, x)
    return _sample(scores, x, y), (seen_y[:, :, None] & seen_x[:, None, :])[:, None]


def _centres(ends: torch.Tensor, side: int, flips: torch.Tensor | None = None) -> torch.Tensor:
    """[B, G]: image coordinates of the crop's cell centres along one axis."""
    part = ((torch.arange(side, device=ends.device) + 0.5) / side)[None]
    if flips is not None:
        part = torch.where(flips[:, None], 1 - part, part)
    return ends[:, :1] + part * (ends[:, 1:] - ends[:, :1])


def _inside(cells: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, W]: the heatmap's cell centres in the crop's own coordinates, and whether they lie in it."""
    part = (cells[None] - low[:, None]) / (high - low)[:, None]
    return part, (part >= 0) & (part <= 1)


def _sample(maps: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Bilinear at the points (y_i, x_j) in [0, 1], clamped at the border."""
    grid_x = (2 * x - 1)[:, None, :].expand(-1, y.shape[1], -1)
    grid_y = (2 * y - 1)[:, :, None].expand(-1, -1, x.shape[1])
    grid = torch.stack([grid_x, grid_y], dim=-1).to(maps.dtype)
    return F.grid_sample(maps, grid, mode="bilinear", padding_mode="border", align_corners=False)
