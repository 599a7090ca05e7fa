"""Changes of colour that move no pixel: jitter, grey and blur, drawn from the sample's own generator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lacuna.data_pipelines.augment import SampleRng

Jitter = tuple[float, float, float, float]
_BLUR_SIGMA = (1.0, 2.0)


def jitter(image: torch.Tensor, strength: Jitter, rng: SampleRng) -> torch.Tensor:
    """Brightness, contrast and saturation times 1 ± strength, hue turned by up to ± strength, in an order drawn anew.

    By our own draws, as RandAugment's (augment.py): torchvision's transform uses the global generator.
    """
    import torchvision.transforms.v2.functional as F  # seconds of a process's start, which few need

    changes = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    order = sorted(range(4), key=lambda _: rng.random())
    for which in order:
        draw, size = 2 * rng.random() - 1, strength[which]
        if size:
            image = changes[which](image, draw * size if which == 3 else max(0.0, 1 + draw * size))
    return image


def grayscale(image: torch.Tensor) -> torch.Tensor:
    import torchvision.transforms.v2.functional as F

    return F.rgb_to_grayscale(image, num_output_channels=3)


def blur(image: torch.Tensor, rng: SampleRng) -> torch.Tensor:
    """3 × 3 pixels, with a standard deviation of 1 to 2."""
    import torchvision.transforms.v2.functional as F

    low, high = _BLUR_SIGMA
    return F.gaussian_blur(image, [3, 3], [low + rng.random() * (high - low)])
