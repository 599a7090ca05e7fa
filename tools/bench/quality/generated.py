"""Small generated sets in the layouts of coco_features and coco_photos, for benches without data and for the tests.

A vector is the sum of its classes' directions and much noise; classes come in groups that like to appear together, as
in photos, and their frequencies differ. What must hold on it: full labels beat one positive per image read as "the
rest is absent".
"""

from __future__ import annotations

import os

import numpy as np
from PIL import Image

CLASSES, WIDTH, GROUPS = 20, 48, 5
SIZES = {"train": 1600, "test": 600}


def generate(folder: str, seed: int = 0) -> str:
    """Writes folder/coco_features unless it is there; the folder, for --data."""
    target = os.path.join(folder, "coco_features")
    if os.path.exists(os.path.join(target, "classes.txt")):
        return folder
    os.makedirs(target, exist_ok=True)
    rng = np.random.default_rng(seed)
    directions = 4 * rng.standard_normal((CLASSES, WIDTH))
    for split, count in SIZES.items():
        labels = _labels(rng, count)
        vectors = labels @ directions + 14 * rng.standard_normal((count, WIDTH))
        np.save(os.path.join(target, f"{split}_features.npy"), vectors.astype(np.float16))
        with open(os.path.join(target, f"{split}_labels.tsv"), "w", encoding="utf-8") as f:
            f.write("image\tfull\tsingle\n")
            for row in range(count):
                present = np.flatnonzero(labels[row])
                f.write(f"{row:06d}\t{' '.join(map(str, present))}\t{rng.choice(present)}\n")
    with open(os.path.join(target, "classes.txt"), "w", encoding="utf-8") as f:  # last: it says that all is there
        f.writelines(f"class {number}\n" for number in range(CLASSES))
    return folder


def generate_photos(folder: str, count: int, size: tuple[int, int] = (640, 480)) -> str:
    """Writes folder/coco_photos with JPEGs that cost what real ones cost to decode; the folder, for --data."""
    target = os.path.join(folder, "coco_photos")
    os.makedirs(os.path.join(target, "train"))
    rng = np.random.default_rng(0)
    lines = ["image\tfull\tsingle"]
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(os.path.join(target, "train", f"{number:06d}.jpg"))
        lines.append(f"{number:06d}.jpg\t{number % CLASSES}\t{number % CLASSES}")
    with open(os.path.join(target, "train_labels.tsv"), "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    with open(os.path.join(target, "classes.txt"), "w", encoding="utf-8") as f:
        f.writelines(f"class {number}\n" for number in range(CLASSES))
    return folder


def _labels(rng: np.random.Generator, count: int) -> np.ndarray:
    """0/1 [count, CLASSES]: each image has a scene, whose classes are likely; at least one class an image."""
    scene = rng.integers(GROUPS, size=count)
    likely = np.arange(CLASSES) % GROUPS == scene[:, None]
    frequency = np.linspace(1.0, 0.3, CLASSES)
    chance = np.where(likely, 0.75, 0.06) * frequency
    labels = (rng.random((count, CLASSES)) < chance).astype(np.int64)
    labels[np.arange(count), scene] |= labels.sum(1) == 0
    return labels
