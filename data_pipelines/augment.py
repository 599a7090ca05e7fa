"""Augmentation that records what it did: pixels, the crop box in the uncropped image, and the flip.

Every draw comes from a generator seeded by (seed, epoch, shard, row), so a sample looks the same whatever worker,
rank or resumed process makes it. Box = (x0, y0, x1, y1) in [0, 1] of the uncropped image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.color import Jitter, blur, grayscale, jitter
from lacuna.data_pipelines.decode import FullSize

_AUGMENT = 3  # keeps augmentation's use of the seed apart from the plan's
Box = tuple[float, float, float, float]
FULL_BOX: Box = (0.0, 0.0, 1.0, 1.0)
_resize_into = torch.ops.aten._upsample_bilinear2d_aa.out
CROPS = ("squash", "random_resized", "center", "same")


@dataclass(frozen=True)
class Augment:
    """What happens to an image on its way to `size` x `size`.

    crop: "squash" ignores the aspect ratio (Cole protocol); "random_resized" takes a box of `scale` of the area;
    "center" resizes the short side to `size / center_fraction` and takes the middle (ImageNet evaluation: 0.875);
    "same" is for a second view and starts from the first one's pixels: the same crop and flip.
    """

    size: int
    crop: str = "squash"
    scale: tuple[float, float] = (0.25, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False
    center_fraction: float = 0.875
    randaugment: int = 0
    """Number of RandAugment operations (0 = off)."""
    randaugment_magnitude: float = 9.0  # of 30
    cutout: float = 0.0
    """Side of the random-colour rectangle as a fraction of the image side (0 = off; ASL and CSL use 0.5)."""
    color_jitter: Jitter = (0.0, 0.0, 0.0, 0.0)
    color_chance: float = 1.0
    grayscale: float = 0.0
    blur: float = 0.0
    scaled_decode: bool = False
    """A JPEG whose random-resized crop is at least twice `size` is decoded at 1/2, 1/4 or 1/8 of its sides."""

    def __post_init__(self):
        assert self.crop in CROPS, self.crop

    def __call__(self, image: torch.Tensor, rng: SampleRng, out: torch.Tensor | None = None,
                 full: FullSize | None = None) -> tuple[torch.Tensor, Box, bool]:
        """uint8 [3, H, W] → (uint8 [3, size, size], box, flipped); the pixels are written to `out` if it is given.

        An image that was decoded smaller comes with its size in full: boxes are drawn, and told, in that.
        """
        out = torch.empty((3, self.size, self.size), dtype=torch.uint8) if out is None else out
        rows, columns, factor = full or FullSize(*image.shape[-2:])
        top, left, height, width = self.pixel_box(rows, columns, rng)
        _resize(image, _decoded(top, height, factor), _decoded(left, width, factor), out)
        flipped = self.flip and self.crop != "same" and rng.random() < 0.5
        if flipped:
            out.copy_(out.flip(-1))
        if self.cutout:
            _cutout(out, self.cutout, rng)
        changed = out
        for _ in range(self.randaugment):
            changed = _randaugment_step(changed, self.randaugment_magnitude / 30, rng)
        changed = self._recolor(changed, rng)
        if changed is not out:
            out.copy_(changed)
        return out, (left / columns, top / rows, (left + width) / columns, (top + height) / rows), flipped

    def shrink(self, rows: int, columns: int, rng: SampleRng) -> float:
        """How many times smaller an image of this size may be, for the crop that the generator draws next."""
        if min(rows, columns) < 2 * self.size:  # no part of it is large enough
            return 1.0
        _, _, height, width = self.pixel_box(rows, columns, rng.copy())
        return min(height, width) / self.size

    @property
    def moves_pixels_unrecorded(self) -> bool:
        """RandAugment's shears and rotations are not in the box: methods that need geometry refuse it."""
        return self.randaugment > 0

    def _recolor(self, image: torch.Tensor, rng: SampleRng) -> torch.Tensor:
        if any(self.color_jitter) and rng.random() < self.color_chance:
            image = jitter(image, self.color_jitter, rng)
        if self.grayscale and rng.random() < self.grayscale:
            image = grayscale(image)
        if self.blur and rng.random() < self.blur:
            image = blur(image, rng)
        return image

    def box(self, rows: int, columns: int, rng: SampleRng) -> Box:
        """The crop that a generator gives an image of this size, without making it."""
        top, left, height, width = self.pixel_box(rows, columns, rng)
        return left / columns, top / rows, (left + width) / columns, (top + height) / rows

    def pixel_box(self, rows: int, columns: int, rng: SampleRng) -> tuple[int, int, int, int]:
        """(top, left, height, width) in whole pixels of the image."""
        if self.crop in ("squash", "same"):
            return 0, 0, rows, columns
        if self.crop == "random_resized":
            return self._random_box(rows, columns, rng)
        side = self.center_fraction * min(rows, columns)
        return _middle(rows, columns, side, side)

    def _random_box(self, rows: int, columns: int, rng: SampleRng) -> tuple[int, int, int, int]:
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = rows * columns * (self.scale[0] + rng.random() * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + rng.random() * (high - low))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= columns and 0 < height <= rows:
                top, left = int(rng.random() * (rows - height + 1)), int(rng.random() * (columns - width + 1))
                return top, left, height, width
        # No box of a legal shape fits (a very long image): the largest legal one in the middle.
        return _middle(rows, columns, min(rows, columns / self.ratio[0]), min(columns, rows * self.ratio[1]))


class SampleRng:
    """Uniform draws that are hashes of a key and a counter: a generator of its own for every sample, at no cost."""

    __slots__ = ("count", "key")

    def __init__(self, key: int):
        self.key, self.count = key, 0

    def copy(self) -> SampleRng:
        """Draws the same numbers from here on, for a look ahead."""
        other = SampleRng(self.key)
        other.count = self.count
        return other

    def random(self) -> float:
        """The next number in [0, 1)."""
        self.count += 1
        return (mix(self.key, self.count) >> 11) * 2.0**-53


def sample_rng(seed: int, epoch: int, shard: int, row: int) -> SampleRng:
    return SampleRng(mix(seed, _AUGMENT, epoch, shard, row))


def _resize(image: torch.Tensor, rows: slice, columns: slice, out: torch.Tensor) -> None:
    """A part of a uint8 [3, H, W], there or on an accelerator, to the size of `out` on the host."""
    size = list(out.shape[-2:])
    if image.device == out.device:
        # The operator itself rather than F.resize: the same kernel, but it fills the batch without a copy. One view and
        # not four: PyTorch gives the interpreter's lock away for each, which costs the threads more than the view.
        (channels, tall, wide), (across, down, along) = image.shape, image.stride()
        sides = min(rows.stop, tall) - rows.start, min(columns.stop, wide) - columns.start
        part = image.as_strided((1, channels, *sides), (channels * across, across, down, along),
                                image.storage_offset() + rows.start * down + columns.start * along)
        _resize_into(part, size, False, None, None, out=out[None])
    else:  # where bytes have no such kernel
        real = torch.nn.functional.interpolate(image[None, :, rows, columns].float(), size, mode="bilinear",
                                               antialias=True)[0]
        out.copy_(real.round_().clamp_(0, 255).to(torch.uint8))


def _decoded(first: int, length: int, factor: int) -> slice:
    """A part of a side, in the whole pixels that were decoded of it."""
    start = round(first / factor)
    return slice(start, max(start + 1, round((first + length) / factor)))


def _middle(rows: int, columns: int, height: float, width: float) -> tuple[int, int, int, int]:
    """The box of about this size in the middle of the image, in whole pixels."""
    tall, wide = max(1, round(height)), max(1, round(width))
    return (rows - tall) // 2, (columns - wide) // 2, tall, wide


def _cutout(image: torch.Tensor, fraction: float, rng: SampleRng) -> None:
    """Paint a random-colour rectangle around a random centre, clipped at the borders."""
    height, width = image.shape[-2:]
    half_h, half_w = int(height * fraction / 2), int(width * fraction / 2)
    y, x = int(rng.random() * height), int(rng.random() * width)
    colour = torch.tensor([int(rng.random() * 256) for _ in range(3)], dtype=torch.uint8)
    image[:, max(0, y - half_h) : y + half_h, max(0, x - half_w) : x + half_w] = colour[:, None, None]


def _randaugment_step(image: torch.Tensor, magnitude: float, rng: SampleRng) -> torch.Tensor:
    """One of the 14 operations of RandAugment, by our own draw: torchvision's uses the global generator."""
    import torchvision.transforms.v2.functional as F  # seconds of a process's start, which few need

    size = image.shape[-1]
    sign = 1 if rng.random() < 0.5 else -1
    bend, shift, turn = sign * 0.3 * magnitude, sign * 150 / 331 * size * magnitude, sign * 30 * magnitude
    factor = 1 + sign * 0.9 * magnitude
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
        return F.posterize(image, 8 - round(4 * magnitude))
    if choice == 11:
        return F.solarize(image, 255 * (1 - magnitude))
    return F.autocontrast(image) if choice == 12 else F.equalize(image)
