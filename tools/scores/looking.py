"""How an outside model looks at an image: at the whole and, on demand, at crops; each is a box that is resized.

Legend: V views of an image, the whole one first; S side of the model's input.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.augment import Augment, SampleRng

_CROPS = 31  # keeps these draws apart from training's
_SCALE = (0.1, 0.5)  # area of a random crop


@dataclass(frozen=True)
class Look:
    """What a model was made for."""

    size: int
    interpolation: str = "bilinear"  # or "bicubic"
    mean: tuple[float, ...] = ()  # of pixels in [0, 1]; empty: the model takes bytes
    std: tuple[float, ...] = ()

    def pixels(self, views: torch.Tensor) -> torch.Tensor:
        """uint8 [V, 3, S, S] → what the model takes."""
        if not self.mean:
            return views
        mean, std = (torch.tensor(values, device=views.device).view(3, 1, 1) for values in (self.mean, self.std))
        return (views.float() / 255 - mean) / std


@dataclass(frozen=True)
class Views:
    """Which boxes of an image a model sees."""

    fit: str = "squash"  # or "center": of the whole image, the square in the middle
    grid: int = 0  # G: G × G crops that cover the image
    random: int = 0  # further crops, drawn for each image
    seed: int = 0

    @property
    def tables(self) -> tuple[str, ...]:
        """AEVLP reads global, crop_max and crop_min; VLPL, GPR and CCD read scores."""
        return ("scores", "global", "crop_max", "crop_min") if self.grid or self.random else ("scores",)

    def boxes(self, height: int, width: int, key: int) -> list[tuple[int, int, int, int]]:
        """(top, left, height, width) in pixels."""
        side = min(height, width)
        whole = (0, 0, height, width)
        if self.fit == "center":
            whole = ((height - side) // 2, (width - side) // 2, side, side)
        rows, columns = ([edge * i // self.grid for i in range(self.grid + 1)] if self.grid else []
                         for edge in (height, width))
        cells = [(top, left, max(1, bottom - top), max(1, right - left))
                 for top, bottom in itertools.pairwise(rows) for left, right in itertools.pairwise(columns)]
        rng, crop = SampleRng(mix(self.seed, _CROPS, key)), Augment(1, "random_resized", _SCALE)
        return [whole, *cells, *(crop.pixel_box(height, width, rng) for _ in range(self.random))]

    def of(self, image: torch.Tensor, look: Look, key: int) -> torch.Tensor:
        """uint8 [3, H, W] → uint8 [V, 3, S, S]."""
        boxes = self.boxes(image.shape[1], image.shape[2], key)
        return torch.cat([F.interpolate(image[None, :, top : top + tall, left : left + wide],
                                        (look.size, look.size), mode=look.interpolation, antialias=True)
                          for top, left, tall, wide in boxes])


def parse_crops(text: str | None, fit: str, seed: int) -> Views:
    """`grid:4`, `random:8`, or none."""
    if text is None:
        return Views(fit, seed=seed)
    kind, _, count = text.partition(":")
    if kind not in ("grid", "random") or not count.isdecimal() or int(count) < 1:
        raise UserError(f"--crops {text}: write grid:G for G × G crops, or random:N; AEVLP has grid:4.")
    return Views(fit, **{kind: int(count)}, seed=seed)


def combined(scores: torch.Tensor, views: Views) -> dict[str, torch.Tensor]:
    """Scores [B, V, L] of all views → tables [B, L]."""
    whole, crops = scores[:, 0], scores[:, 1:]
    if len(views.tables) == 1:
        return {"scores": whole}
    return {"scores": whole, "global": whole, "crop_max": crops.amax(1), "crop_min": crops.amin(1)}
