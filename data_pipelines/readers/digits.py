"""Scenes of 1-4 real handwritten digits (scikit-learn's, installed with it) on a cluttered canvas, fully labelled.

A small multi-label set that needs no download: for the demo and for tests. Train and test use different digits.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, Sample

SIDE = 32
_GLYPH = 14  # pixels of a digit's side, ± 2
_TRAIN_GLYPHS = 1300  # of 1797; the rest is for the other splits
_SPLITS = {"train": 0, "val": 1, "test": 2}


def configure(group) -> None:
    group.add_argument("--count", type=int, default=4000, help="number of scenes (default 4000)")
    group.add_argument("--split", default="train", choices=list(_SPLITS), help="which digits to draw from")
    group.add_argument("--scene-seed", dest="scene_seed", type=int, default=0, help="other seed, other scenes")


def read(count: int = 4000, split: str = "train", scene_seed: int = 0) -> Dataset:
    if split not in _SPLITS or count < 1:
        raise UserError(f"digits: split {split!r}, count {count}; legal: {', '.join(_SPLITS)}, and a count ≥ 1.")
    scenes = [Scene(mix(scene_seed, _SPLITS[split], i), split == "train") for i in range(count)]
    samples = [Sample(f"scene-{i:06d}", scene, "jpg") for i, scene in enumerate(scenes)]
    labels = SparseLabels.from_lists([scene.digits() for scene in scenes], [[]] * count, NEGATIVE)
    return Dataset([str(d) for d in range(10)], samples, labels, split,
                   source={"reader": "digits", "count": count, "scene_seed": scene_seed})


@dataclass(frozen=True)
class Scene:
    """One picture; drawn where its shard is written."""

    seed: int
    train: bool

    def digits(self) -> list[int]:
        return sorted({int(_glyphs()[1][g]) for g in self._chosen(np.random.default_rng(self.seed))})

    def read(self) -> bytes:
        rng = np.random.default_rng(self.seed)
        chosen = self._chosen(rng)
        canvas = rng.normal(40, 18, (SIDE, SIDE)).clip(0, 255)
        for _ in range(8):  # clutter: scraps of digits that are no digits
            scrap = _glyphs()[0][rng.integers(len(_glyphs()[0]))]
            top, left = rng.integers(0, 5, 2)
            _paste(canvas, scrap[top : top + 4, left : left + 4], int(rng.integers(4, 8)), rng.integers(0, SIDE, 2),
                   float(rng.uniform(0.3, 0.6)))
        quarters = rng.permutation(4)[: len(chosen)]  # one digit a quarter, so that none hides another
        for glyph, quarter in zip(chosen, quarters, strict=True):
            side = int(_GLYPH + rng.integers(-2, 3))
            room = SIDE // 2 - side
            corner = np.array([quarter // 2, quarter % 2]) * (SIDE // 2) + rng.integers(0, max(1, room + 1), 2)
            _paste(canvas, _glyphs()[0][glyph], side, corner, float(rng.uniform(0.8, 1.0)))
        buffer = io.BytesIO()
        Image.fromarray(canvas.clip(0, 255).astype(np.uint8)).convert("RGB").save(buffer, "JPEG", quality=90)
        return buffer.getvalue()

    def _chosen(self, rng: np.random.Generator) -> np.ndarray:
        """1-4 glyphs; always the first draws of the scene's generator."""
        total = len(_glyphs()[0])
        low, high = (0, _TRAIN_GLYPHS) if self.train else (_TRAIN_GLYPHS, total)
        return rng.integers(low, high, int(rng.integers(1, 5)))


@cache
def _glyphs() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images * (255 / 16), bunch.target


def _paste(canvas: np.ndarray, glyph: np.ndarray, side: int, corner: np.ndarray, strength: float) -> None:
    """Brighten the canvas by a resized glyph, cut off at the border."""
    picture = np.asarray(Image.fromarray(glyph.astype(np.float32)).resize((side, side), Image.Resampling.BILINEAR))
    y, x = int(corner[0]), int(corner[1])
    picture = picture[: canvas.shape[0] - y, : canvas.shape[1] - x]
    region = canvas[y : y + picture.shape[0], x : x + picture.shape[1]]
    np.maximum(region, picture * strength, out=region)
