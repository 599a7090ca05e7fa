"""Bytes of a sample to what a model takes: the decoded, cropped and augmented views, or a vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lacuna.data_pipelines.augment import FULL_BOX, Augment, Box, sample_rng
from lacuna.data_pipelines.decode import DecodeError, decode_scaled, decode_vector
from lacuna.data_pipelines.device_decoder import Decoded, DeviceDecoder


@dataclass(frozen=True)
class SampleMaker:
    """Bytes of one member to a model input."""

    augment: Augment | None  # None: feature shards
    seed: int
    epoch: int
    features: int = 0
    strong: Augment | None = None  # makes a second view
    decoder: DeviceDecoder | None = None  # for JPEGs, instead of the host's

    @property
    def _scaled(self) -> bool:
        # A second view with a crop of its own is cut from the same pixels, and its box is not known yet.
        return (self.augment is not None and self.augment.scaled_decode and self.augment.crop == "random_resized"
                and (self.strong is None or self.strong.crop == "same"))

    def empty(self, count: int, pin: bool) -> torch.Tensor:
        """[views, count, …]"""
        if self.augment is None:
            return torch.empty((1, count, self.features), pin_memory=pin)
        views, side = 1 if self.strong is None else 2, self.augment.size
        return torch.empty((views, count, 3, side, side), dtype=torch.uint8, pin_memory=pin)

    def each(self, members: list[bytes]) -> Iterator[tuple[bytes, Decoded | None]]:
        """Members that are made together, with those images that a device has decoded; make them before the end."""
        if self.decoder is None:
            yield from ((data, None) for data in members)
            return
        with self.decoder.queue():
            yield from zip(members, self.decoder(members), strict=True)

    def __call__(self, data: bytes, shard: int, row: int, views: torch.Tensor | list[torch.Tensor],
                 decoded: Decoded | None = None) -> tuple[Box, bool]:
        """Fill every view; the crop box of the first and whether it was flipped."""
        out = views[0]
        if self.augment is None:
            vector = decode_vector(data)
            if len(vector) != self.features:
                raise DecodeError(f"vector of {len(vector)} numbers, the others have {self.features}")
            out.copy_(torch.from_numpy(vector))
            return FULL_BOX, False
        rng = sample_rng(self.seed, self.epoch, shard, row)
        image, full = decoded or decode_scaled(data, partial(self.augment.shrink, rng=rng) if self._scaled else None)
        _, box, flipped = self.augment(image, rng, out, full)
        if self.strong is not None:
            # The same generator goes on: other draws than the first view's.
            self.strong(out if self.strong.crop == "same" else image, rng, views[1])
        return box, flipped
