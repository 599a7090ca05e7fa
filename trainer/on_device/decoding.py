"""Whether JPEGs are decoded on the training device (`data.decode`), and by what. Never seen on a GPU: docs/gpu.md."""

from __future__ import annotations

import functools
import logging

import numpy as np
import simplejpeg
import torch

from lacuna.data_pipelines.device_decoder import DeviceDecoder, Jpegs
from lacuna.trainer.config.data_section import DataConfig

log = logging.getLogger("lacuna")


def device_decoder(data: DataConfig, device: torch.device) -> DeviceDecoder | None:
    """None: the host decodes."""
    return None if data.decode == "cpu" else _tried(device)


@functools.lru_cache
def _tried(device: torch.device) -> DeviceDecoder | None:
    """Tried once per process, with a small picture; if it cannot be had, that is said once, too."""
    reason = "the run is not on a GPU"
    if device.type == "cuda":
        decoder = DeviceDecoder(device, functools.partial(nvjpeg, device=device))
        try:
            with decoder.queue():
                picture = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
                decoder.decode([torch.frombuffer(bytearray(picture), dtype=torch.uint8)])
            return decoder
        except (RuntimeError, AssertionError, ImportError, AttributeError) as error:  # no GPU, or a build without it
            reason = f"it cannot be had here ({type(error).__name__}: {str(error).splitlines()[0]})"
    log.info("data.decode=device: %s; images are decoded on the CPU", reason)
    return None


def nvjpeg(jpegs: Jpegs, device: torch.device) -> list[torch.Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg  # seconds of a process's start, which few need

    return list(decode_jpeg(jpegs, ImageReadMode.RGB, device))
