"""A pretended accelerator: its tensors hold real values, refuse to mix with the host's, and every wait is recorded.

A tensor of the device (`Held`) wraps a host tensor and says `pretended:0`; PyTorch's autograd, modules and DeepSpeed
take it for one of an accelerator. What makes a host wait for a real GPU's queue is noted with its place: reading a
value back, shapes that depend on values, blocking copies either way. A copy to the host that does not block arrives
only when somebody waits for it: until then the host's tensor holds other values, as it may with a real device.
The registration lasts as long as the process: use it in a process of its own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lacuna.tools.bench.device import python_backend

NAME = "pretended"
_ROOT = Path(__file__).resolve().parents[2]
_TORCH = str(Path(torch.__file__).parent)
# Operations whose result has a shape or a type that only the values know.
_READ_BACKS = ("_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
               "equal", "is_nonzero", "masked_select", "histc", "_histogramdd_bin_edges")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


Copy = tuple[torch.Tensor, torch.Tensor]  # host tensor, values to come


@dataclass(frozen=True)
class Wait:
    what: str
    where: str  # file:line, from the repository's root


@dataclass
class Record:
    """What happened on the device; `waits` only while `inside` (a step)."""

    waits: list[Wait] = field(default_factory=list)
    inside: bool = False
    operations: int = 0
    late: list[Copy] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def wait(self, what: str) -> None:
        self.arrive()
        if self.inside:
            self.waits.append(Wait(what, _place()))

    def arrive(self, copies: list[Copy] | None = None) -> None:
        """These copies to the host are done, or all."""
        with self.lock:
            for host, values in self.late if copies is None else copies:
                host.copy_(values)
            self.late = [] if copies is None else [copy for copy in self.late if not any(copy is c for c in copies)]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


RECORD = Record()


class Held(torch.Tensor):
    """A tensor of the device; `raw` has its values."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Held:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=f"{NAME}:0")

    def __init__(self, raw: torch.Tensor):
        self.raw = raw

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> list:
        RECORD.wait("tolist")
        return self.raw.tolist()

    def record_stream(self, stream: object) -> None: ...

    def __reduce_ex__(self, protocol):
        """In a file it is a tensor of the host, as a checkpoint's reader asks for anyway."""
        RECORD.wait("save")
        return self.raw.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Active around a run: makes new tensors on the device where that is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    flat, spec = tree_flatten((args, kwargs))
    wanted = kwargs.get("device")
    asked = wanted is not None and torch.device(wanted).type == NAME
    if not asked and not any(isinstance(x, Held) for x in flat):
        return func(*args, **kwargs)
    RECORD.operations += 1
    name = func._schema.name.split("::")[1]
    if name == "_to_copy":
        return _to_copy(func, args, kwargs)
    if name == "copy_":
        return _copy(args[0], args[1], *args[2:], **kwargs)
    _note_waits(name, args, flat)
    _check_devices(func, name, args, flat)
    owners = {id(x.raw): x for x in flat if isinstance(x, Held)}
    args, kwargs = tree_unflatten([x.raw if isinstance(x, Held) else x for x in flat], spec)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    out = func(*args, **kwargs)
    for owner in owners.values():
        assert owner.shape == owner.raw.shape, f"{func} changes a shape in place, which is not pretended here"
    return tree_map(lambda x: owners.get(id(x)) if id(x) in owners else Held(x) if isinstance(x, torch.Tensor) else x,
                    out)


def _note_waits(name: str, args, flat) -> None:
    if name in _READ_BACKS or (name == "repeat_interleave" and isinstance(args[0], Held) and len(args) == 1):
        RECORD.wait(name)
    if name in _INDEXING and isinstance(args[0], Held):
        for index in args[1]:
            if index is not None and not isinstance(index, Held) and index.ndim:
                RECORD.wait("indices from the host")
            elif index is not None and index.dtype in (torch.bool, torch.uint8):
                RECORD.wait("boolean mask as index")


def _check_devices(func, name: str, args, flat) -> None:
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    if name in _INDEXING:
        tensors = [args[0], *(x for x in args[2:] if isinstance(x, torch.Tensor))]
    if any(not isinstance(x, Held) and x.ndim for x in tensors) and any(isinstance(x, Held) for x in tensors):
        raise RuntimeError(f"{func}: tensors of the host and of the device in one operation")


def _to_copy(func, args, kwargs):
    source, target = args[0], kwargs.get("device")
    to_host = target is not None and torch.device(target).type != NAME
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
    if not isinstance(source, Held):  # up
        if not kwargs.get("non_blocking"):
            RECORD.wait("blocking copy to the device")
        return Held(func(source, **rest))
    if not to_host:
        return Held(func(source.raw, **rest))
    values = func(source.raw, **rest)
    if not kwargs.get("non_blocking"):
        RECORD.wait("blocking copy to the host")
        return values
    return _later(torch.empty_like(values), values)


def _copy(target, source, non_blocking: bool = False):
    if isinstance(target, Held):
        if not isinstance(source, Held) and not non_blocking:
            RECORD.wait("blocking copy to the device")
        target.raw.copy_(source.raw if isinstance(source, Held) else source)
    elif non_blocking:
        _later(target, source.raw.clone())
    else:
        RECORD.wait("blocking copy to the host")
        target.copy_(source.raw)
    return target


def _later(host: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The host sees other values until it waits."""
    host.view(torch.uint8).fill_(0xA5) if host.numel() and host.dtype != torch.bool else host.fill_(True)
    with RECORD.lock:
        RECORD.late.append((host, values))
    return host


def _place() -> str:
    """The innermost line of ours, or of a library that is not PyTorch."""
    frames = [frame for frame in traceback.extract_stack(sys._getframe(1))
              if not frame.filename.startswith(_TORCH) and frame.filename != __file__ and frame.filename[0] != "<"]
    own = [frame for frame in frames if frame.filename.startswith(str(_ROOT)) and "site-packages" not in frame.filename]
    if not frames:
        return "backward"
    frame = own[-1] if own and frames[-1] not in own and "deepspeed" not in frames[-1].filename else frames[-1]
    path = Path(frame.filename).resolve()
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(*path.parts[-2:])
    return f"{shown}:{frame.lineno} {frame.name}"


class Stream:
    def __init__(self, device: object = None): ...

    def wait_stream(self, other: Stream) -> None: ...


class Event:
    """Marks the copies that were under way when it was recorded."""

    def record(self, stream: Stream) -> None:
        with RECORD.lock:
            self.copies = list(RECORD.late)

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():
            RECORD.wait("event")
        else:
            time.sleep(0.005)  # whoever does not wait for the thread finds other values
        RECORD.arrive(self.copies)


class _Module(python_backend.Module):
    """What PyTorch asks `torch.pretended`."""

    def current_stream(self) -> Stream:
        return Stream()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def synchronize(self, device: object = None) -> None:
        RECORD.wait("synchronize")


def register() -> torch.device:
    """Make the device known to PyTorch and DeepSpeed; once per process, before DeepSpeed is imported elsewhere."""
    return python_backend.register(NAME, _Module(Stream, Event), lambda: RECORD.wait("synchronize"), Held, _copy,
                                   "cpu")
