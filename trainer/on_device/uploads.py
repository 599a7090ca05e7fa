"""From the host to the training device without waiting for its queue."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch


def to_device(values: np.ndarray | torch.Tensor, device: torch.device,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values there, converted on the host. A blocking copy would wait for all work queued before it; one from
    memory that is not pinned too."""
    found = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    found = found if dtype is None else found.to(dtype)
    if found.device.type != "cpu" or device.type == "cpu":
        return found
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)


def beside(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same for larger tensors, on a stream of its own: the copy runs while the device still computes what was
    queued before, and only what comes after waits for it."""
    if device.type == "cpu" or (isinstance(values, torch.Tensor) and values.device.type != "cpu"):
        return to_device(values, device)
    module, side = _side(device)
    with module.stream(side):
        found = to_device(values, device)
    current = module.current_stream()
    current.wait_stream(side)
    found.record_stream(current)  # its memory is not given to another copy before the work is done
    return found


@functools.lru_cache
def _side(device: torch.device) -> tuple[Any, Any]:
    module: Any = torch.get_device_module(device)
    return module, module.Stream(device)


def host_buffer(shape: tuple[int, ...], dtype: np.dtype, device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
    """Host memory that copies to the device without waiting, as a tensor (uint16 as int16) and as an array."""
    kind = torch.from_numpy(np.empty(0, np.int16 if dtype == np.uint16 else dtype)).dtype
    tensor = torch.empty(shape, dtype=kind, pin_memory=device.type == "cuda")
    return tensor, tensor.numpy().view(dtype)
