"""A device of our own for PyTorch and DeepSpeed, made of wrapper tensors written in Python (PrivateUse1).

The registration lasts as long as the process: use it in a process of its own, before DeepSpeed is asked for its
accelerator elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Module:
    """What PyTorch asks `torch.NAME`; the device adds what its streams do."""

    def __init__(self, stream: type, event: type):
        self.Stream, self.Event = stream, event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register(name: str, module: Module, synchronize: Callable[[], None], wrap: Callable[[torch.Tensor], torch.Tensor],
             copy: Callable, values: str) -> torch.device:
    """`wrap`: a tensor on the device `values` ("cpu", or "meta" for none) → the device's own; `copy`: its `copy_`."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, module)

    class Accelerator(CPU_Accelerator):
        def device_name(self, device_index=None):
            return name if device_index is None else f"{name}:{device_index}"

        def current_device_name(self):
            return f"{name}:0"

        def is_synchronized_device(self):
            return False

        def use_host_timers(self):
            return True

        def synchronize(self, device_index=None):
            synchronize()

        def on_accelerator(self, tensor):
            return tensor.device.type == name

    set_accelerator(Accelerator())

    def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
        return wrap(torch.empty_strided(size, stride, dtype=dtype, device=values))

    def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        return wrap(torch.empty(size, dtype=dtype, device=values,
                                memory_format=memory_format or torch.contiguous_format))

    # torch.tensor(…, device=…) and lists as indices are made below Python's dispatch: these kernels serve them.
    for operation, kernel in (("empty_strided", empty_strided), ("empty.memory_format", empty), ("copy_", copy)):
        _LIBRARY.impl(operation, kernel, "PrivateUse1")
    return torch.device(name, 0)


_LIBRARY = torch.library.Library("aten", "IMPL")
