"""JPEGs decoded and cropped by an accelerator (torchvision's nvJPEG path), for machines whose cores cannot feed it.

What comes back is the crop at the size of the model's input: everything after it (flip, colours, second views, labels,
batches) stays on the host, the same for both decoders. A worker waits for its own queue only, never the training loop.
Pixels differ from the host's by a few levels: other arithmetic in the decoder and in the resize.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from lacuna.data_pipelines.decode import FullSize, is_plain_jpeg, turn_of, turned

Jpegs = list[torch.Tensor]  # each uint8 [bytes], on the host
Decoded = tuple[torch.Tensor, FullSize]


@dataclass(frozen=True)
class DeviceDecoder:
    """`decode` gives uint8 [3, H, W] on the device for every JPEG, or raises RuntimeError for all of them."""

    device: torch.device
    decode: Callable[[Jpegs], list[torch.Tensor]]
    _mine: threading.local = field(default_factory=threading.local, compare=False, repr=False)

    def queue(self) -> AbstractContextManager:
        """A queue of the calling thread's own, for everything that it asks of the device inside."""
        module: Any = torch.get_device_module(self.device)
        if not hasattr(self._mine, "stream"):
            self._mine.stream = module.Stream(self.device)
        return module.stream(self._mine.stream)

    def __call__(self, members: list[bytes]) -> list[Decoded | None]:
        """Images as seen (turned as EXIF says), on the device; None for what the host has to decode."""
        found: list[Decoded | None] = [None] * len(members)
        places = [place for place, data in enumerate(members) if is_plain_jpeg(data)]
        for place, image in zip(places, self._decoded([members[place] for place in places]), strict=True):
            if image is not None:
                image = turned(image, turn_of(members[place]))
                found[place] = image, FullSize(image.shape[-2], image.shape[-1])
        return found

    def _decoded(self, jpegs: list[bytes]) -> list[torch.Tensor | None]:
        if not jpegs:
            return []
        try:
            return list(self.decode([torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in jpegs]))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # One bad file fails its whole list. Alone, so that it does not change how its neighbours are decoded; the
            # host then says what is wrong with it, or can read it after all.
            return [None] if len(jpegs) == 1 else [image for data in jpegs for image in self._decoded([data])]
