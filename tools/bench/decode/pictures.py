"""The JPEGs that every contender of `lacuna bench decode` decodes, and the boxes that are cut from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision import transforms

CLASSES = 8
_QUALITY = 90
Boxes = list[tuple[int, int, int, int]]  # top, left, height, width
Size = tuple[int, int]  # height, width


def random_boxes(count: int, size: Size, scale: tuple[float, float], ratio: tuple[float, float]) -> Boxes:
    """Drawn before the clock runs, as torchvision draws them."""
    image = torch.empty((3, *size), dtype=torch.uint8)
    return [transforms.RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(count)]


def write_folder(photos: list[bytes], root: Path, count: int) -> None:
    """`count` files in one subfolder per class; photos are used again when they run out."""
    for i in range(count):
        path = root / f"class-{i % CLASSES}" / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photos[i % len(photos)])


def make_photos(count: int, size: Size) -> tuple[list[bytes], str]:
    """JPEGs and where they come from."""
    real = Path(os.environ.get("LACUNA_EVAL_DATA", os.devnull), "coco_photos", "train")
    names = sorted(real.glob("*.jpg")) if real.is_dir() else []
    rng = np.random.default_rng(0)
    paint: Callable[[], np.ndarray] = (lambda: mosaic(names, rng, size)) if names else (lambda: scene(rng, size))
    return [encode(paint()) for _ in range(count)], "mosaics of real photos" if names else "made up"


def mosaic(names: list[Path], rng: np.random.Generator, size: Size) -> np.ndarray:
    """Photos side by side: their detail at the size that the other contenders are known for."""
    down, across = -(-size[0] // 160), -(-size[1] // 160)
    tiles = []
    for name in rng.choice(np.array(names, dtype=object), down * across):
        with Image.open(name) as picture:
            tiles.append(np.asarray(picture.convert("RGB").resize((160, 160))))
    rows = [np.concatenate(tiles[start : start + across], axis=1) for start in range(0, len(tiles), across)]
    return np.concatenate(rows)[: size[0], : size[1]]


def scene(rng: np.random.Generator, size: Size) -> np.ndarray:
    """Smooth fields at several scales, a few hard-edged shapes and sensor noise."""
    height, width = size
    canvas = np.full((height, width, 3), 128.0, np.float32)
    for cells in (3, 12, 48, 160):
        field = rng.normal(0, 1, (cells, cells, 3)).astype(np.float32)
        for channel in range(3):
            grown = Image.fromarray(field[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
            canvas[..., channel] += 90 / cells**0.5 * np.asarray(grown)
    for _ in range(12):
        top, left = rng.integers(0, height - 20), rng.integers(0, width - 20)
        tall, wide = rng.integers(10, 150, 2)
        canvas[top : top + tall, left : left + wide] += rng.normal(0, 40, 3)
    canvas += rng.normal(0, 6, (height, width, 1))
    return canvas.clip(0, 255).astype(np.uint8)


def encode(image: np.ndarray) -> bytes:
    return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=_QUALITY, colorsubsampling="420")
