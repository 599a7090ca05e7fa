"""Pictures of noise that cost what real ones cost to decode."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Noise:
    seed: int
    side: int = 72

    def read(self) -> bytes:
        """A JPEG."""
        rng = np.random.default_rng(self.seed)
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((self.side, self.side), Image.Resampling.BICUBIC).save(buffer, "JPEG")
        return buffer.getvalue()
