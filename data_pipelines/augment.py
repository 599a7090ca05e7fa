"""Augmentation that records what it did: pixels, the crop box in the uncropped image, and the flip.

Every draw comes from a generator seeded by (seed, epoch, shard, row), so a sample looks the same whatever worker,
rank or resumed process makes it. Box = (x0, y0, x1, y1) in [0, 1] of the uncropped image.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
import torchvision.transforms.v2.functional as F

from data_pipelines.hashing import mix

_AUGMENT = 3  # keeps augmentation's use of the seed apart from the plan's
FULL_BOX = (0.0, 0.0, 1.0, 1.0)
CROPS = ("squash", "random_resized", "center")


@dataclass(frozen=True)
class Augment:
    """What happens to an image on its way to `size` x `size`.

    crop: "squash" ignores the aspect ratio (Cole protocol); "random_resized" takes a box of `scale` of the area;
    "center" resizes the short side to `size / center_fraction` and takes the middle (ImageNet evaluation: 0.875).
    """

    size: int
    crop: str = "squash"
    scale: tuple[float, float] = (0.25, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False
    center_fraction: float = 0.875
    randaugment: int = 0
    """Number of RandAugment operations (0 = off), at magnitude 9 of 30."""
    cutout: float = 0.0
    """Side of the random-colour rectangle as a fraction of the image side (0 = off; ASL and CSL use 0.5)."""

    def __call__(self, image: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, tuple, bool]:
        """uint8 [3, H, W] → (uint8 [3, size, size], box, flipped)."""
        image, box = getattr(self, "_" + self.crop)(image, rng)
        flipped = self.flip and rng.random() < 0.5
        if flipped:
            image = image.flip(-1)
        if self.cutout:
            image = _cutout(image, self.cutout, rng)
        for _ in range(self.randaugment):
            image = _randaugment_step(image, rng)
        return image, box, flipped

    @property
    def moves_pixels_unrecorded(self) -> bool:
        """RandAugment's shears and rotations are not in the box: methods that need geometry refuse it."""
        return self.randaugment > 0

    def _resize(self, image: torch.Tensor) -> torch.Tensor:
        return F.resize(image, [self.size, self.size], antialias=True)

    def _squash(self, image: torch.Tensor, rng: random.Random):
        return self._resize(image), FULL_BOX

    def _center(self, image: torch.Tensor, rng: random.Random):
        height, width = image.shape[-2:]
        side = self.center_fraction * min(height, width)
        return self._cut(image, (height - side) / 2, (width - side) / 2, side, side)

    def _random_resized(self, image: torch.Tensor, rng: random.Random):
        height, width = image.shape[-2:]
        for _ in range(10):
            area = height * width * (self.scale[0] + rng.random() * (self.scale[1] - self.scale[0]))
            low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
            ratio = math.exp(low + rng.random() * (high - low))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return self._cut(image, int(rng.random() * (height - h + 1)), int(rng.random() * (width - w + 1)), h, w)
        # No box of a legal shape fits (a very long image): the largest legal one in the middle.
        widest, tallest = min(width, height * self.ratio[1]), min(height, width / self.ratio[0])
        return self._cut(image, (height - tallest) / 2, (width - widest) / 2, tallest, widest)

    def _cut(self, image: torch.Tensor, top: float, left: float, height: float, width: float):
        top, left = round(top), round(left)
        height, width = max(1, round(height)), max(1, round(width))
        rows, columns = image.shape[-2:]
        cut = self._resize(image[:, top : top + height, left : left + width])
        return cut, (left / columns, top / rows, (left + width) / columns, (top + height) / rows)


def sample_rng(seed: int, epoch: int, shard: int, row: int) -> random.Random:
    return random.Random(mix(seed, _AUGMENT, epoch, shard, row))


def _cutout(image: torch.Tensor, fraction: float, rng: random.Random) -> torch.Tensor:
    """A random-colour rectangle around a random centre, clipped at the borders."""
    height, width = image.shape[-2:]
    half_h, half_w = int(height * fraction / 2), int(width * fraction / 2)
    y, x = int(rng.random() * height), int(rng.random() * width)
    colour = torch.tensor([int(rng.random() * 256) for _ in range(3)], dtype=torch.uint8)
    image = image.clone()
    image[:, max(0, y - half_h) : y + half_h, max(0, x - half_w) : x + half_w] = colour[:, None, None]
    return image


_MAGNITUDE = 9 / 30


def _randaugment_step(image: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """One of the 14 operations of RandAugment, by our own draw: torchvision's uses the global generator."""
    size = image.shape[-1]
    sign = 1 if rng.random() < 0.5 else -1
    bend, shift, turn = sign * 0.3 * _MAGNITUDE, sign * 150 / 331 * size * _MAGNITUDE, sign * 30 * _MAGNITUDE
    factor = 1 + sign * 0.9 * _MAGNITUDE
    choice = int(rng.random() * 14)
    if choice == 0:
        return image
    if choice == 1:
        return F.affine(image, 0.0, [0, 0], 1.0, [math.degrees(math.atan(bend)), 0.0], center=[0, 0])
    if choice == 2:
        return F.affine(image, 0.0, [0, 0], 1.0, [0.0, math.degrees(math.atan(bend))], center=[0, 0])
    if choice == 3:
        return F.affine(image, 0.0, [int(shift), 0], 1.0, [0.0, 0.0])
    if choice == 4:
        return F.affine(image, 0.0, [0, int(shift)], 1.0, [0.0, 0.0])
    if choice == 5:
        return F.rotate(image, turn)
    enhance = [F.adjust_brightness, F.adjust_saturation, F.adjust_contrast, F.adjust_sharpness]
    if choice <= 9:
        return enhance[choice - 6](image, factor)
    if choice == 10:
        return F.posterize(image, 8 - round(4 * _MAGNITUDE))
    if choice == 11:
        return F.solarize(image, 255 * (1 - _MAGNITUDE))
    return F.autocontrast(image) if choice == 12 else F.equalize(image)
