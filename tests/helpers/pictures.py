"""Small image files for tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (24, 16), form: str = "JPEG") -> bytes:
    """A random picture of (width, height)."""
    pixels = np.random.RandomState(seed).randint(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def write_pictures(folder: Path, names: list[str]) -> Path:
    """One picture for each relative name, all different."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed, form="PNG" if name.endswith("png") else "JPEG"))
    return folder
