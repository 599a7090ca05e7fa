"""From the host to the training device without waiting for its queue."""

from __future__ import annotations

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
