"""From the training device to the host, without waiting: copies on a stream of their own, and an event to wait for."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Download:
    """Host tensors that hold their values once `wait` has returned."""

    event: Any
    parts: list[torch.Tensor]

    def wait(self) -> list[np.ndarray]:
        self.event.synchronize()
        return [part.numpy() for part in self.parts]


class Downloads:
    """Of one device; the copies run beside what is computed meanwhile, and `threads` wait for them."""

    def __init__(self, device: torch.device, threads: Executor):
        self.threads = threads
        self.module: Any = torch.get_device_module(device)
        self.side = self.module.Stream(device)

    def begin(self, tensors: list[torch.Tensor]) -> Download:
        """Copy them as they are now, into pinned memory."""
        self.side.wait_stream(self.module.current_stream())
        with self.module.stream(self.side):
            parts = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            event = self.module.Event()
            event.record(self.side)
        for tensor in tensors:
            tensor.record_stream(self.side)  # its memory is not given to others before the copy is done
        return Download(event, parts)
