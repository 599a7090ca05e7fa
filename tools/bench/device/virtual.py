"""A virtual accelerator: its tensors have shapes but no values, so that an operation costs the host its launch alone.

What the host reads back comes from precomputed numbers. Anything that makes a host wait for a real GPU waits here for
the queues (queues.py): reading a value, shapes that depend on values, blocking copies either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lacuna.tools.bench.device import python_backend
from lacuna.tools.bench.device.queues import QUEUES, Event, Stream

NAME = "virtual"
_POOL = 1 << 24  # bytes of precomputed numbers


Spec = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]  # shape, strides, offset


class Held(torch.Tensor):
    """A tensor of the device."""

    spec: Spec

    @staticmethod
    def __new__(cls, spec: Spec) -> Held:
        shape, strides, offset, dtype = spec
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=torch.device(f"{NAME}:0"))

    def __init__(self, spec: Spec):
        self.spec = spec

    @classmethod
    def like(cls, raw: torch.Tensor) -> Held:
        return cls(_spec(raw))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> list:
        return self.cpu().tolist()

    def record_stream(self, stream: object) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return _run(func, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Active around a run: makes new tensors on the device where that is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _spec(tensor: torch.Tensor) -> Spec:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


@dataclass(frozen=True)
class _Same:
    """The result is this one of the operation's tensors."""

    place: int


_RESULTS: dict[tuple, Any] = {}  # operation and arguments → specs of what comes out: shapes are worked out once


def _run(func, args, kwargs):
    held: list[Held] = []
    key = (func, _key(args, held), *((name, _key(value, held)) for name, value in kwargs.items()))
    wanted = kwargs.get("device")
    if not held and (wanted is None or torch.device(wanted).type != NAME):
        return func(*args, **kwargs)
    name = func._schema.name
    if name in _COPIES:
        return _COPIES[name](*args, **kwargs)
    if name == "aten::_local_scalar_dense":
        QUEUES.synchronise()
        return _numbers(args[0])[0].item()
    if name in _INDEXING:
        args = (args[0], [_index(index) for index in args[1]], *args[2:])
    if key not in _RESULTS:
        _RESULTS[key] = _worked_out(func, args, kwargs, held)
    return _made(_RESULTS[key], held)


def _key(value, held: list[Held]):
    """What a result's shape may depend on; a float never does."""
    if isinstance(value, Held):
        held.append(value)
        return value.spec
    if isinstance(value, torch.Tensor):
        return _spec(value)
    if type(value) in (tuple, list):
        return tuple([_key(part, held) for part in value])
    return float if type(value) is float else value


def _worked_out(func, args, kwargs, held: list[Held]):
    raw: dict[int, torch.Tensor] = {}
    for tensor in held:
        shape, strides, _, dtype = tensor.spec
        raw.setdefault(id(tensor), torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    places = {id(raw[id(tensor)]): _Same(place) for place, tensor in enumerate(held)}
    args, kwargs = tree_map(lambda x: raw.get(id(x), x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    kwargs.pop("pin_memory", None)
    return _specs(func(*args, **kwargs), places)


def _specs(out, places: dict[int, _Same]):
    if isinstance(out, torch.Tensor):
        return places.get(id(out)) or _spec(out)
    return [_specs(part, places) for part in out] if type(out) in (tuple, list) else out


def _made(result, held: list[Held]):
    if type(result) is tuple:
        return Held(result)
    if type(result) is _Same:
        return held[result.place]
    return [_made(part, held) for part in result] if type(result) is list else result


_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")


def _index(index: torch.Tensor | None) -> torch.Tensor | None:
    """Indices from the host must go up first; a mask's count decides a shape."""
    if index is None or (isinstance(index, Held) and index.dtype not in (torch.bool, torch.uint8)):
        return index
    QUEUES.synchronise()
    if index.dtype in (torch.bool, torch.uint8):
        raise RuntimeError("a boolean mask as an index: its shape is unknown on a device without values")
    return Held(_spec(index))


def _to_copy(source, *, dtype=None, device=None, non_blocking=False, memory_format=None, **_):
    shape, strides, _offset, found = source.spec if isinstance(source, Held) else _spec(source)
    dtype = found if dtype is None else dtype
    if device is not None and torch.device(device).type != NAME:
        return _copy(torch.empty(shape, dtype=dtype), source, non_blocking)
    if not isinstance(source, Held):
        _moved(source, non_blocking)
    if memory_format not in (None, torch.preserve_format):
        strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    elif 0 in strides or source.storage_offset():
        strides = torch.empty(shape, device="meta").stride()
    return Held((shape, strides, 0, dtype))


def _copy(target, source, non_blocking: bool = False):
    if not isinstance(source, Held) or not isinstance(target, Held):
        _moved(source, non_blocking)
    if not isinstance(target, Held):
        target.copy_(_numbers(target).view(target.shape))
    return target


_COPIES: dict[str, Callable] = {"aten::_to_copy": _to_copy, "aten::copy_": _copy}


def _moved(source: torch.Tensor, non_blocking: bool) -> None:
    QUEUES.copy(source.numel() * source.element_size())
    if not non_blocking:
        QUEUES.synchronise()


_RANDOM = np.random.default_rng(0)
_BYTES = torch.from_numpy(_RANDOM.integers(0, 256, _POOL, dtype=np.uint8))
_UNIFORM = torch.from_numpy(_RANDOM.random(_POOL // 8, dtype=np.float32))


def _numbers(like: torch.Tensor) -> torch.Tensor:
    """What the host finds: true, any byte, a small integer (a class's number, a code), or a number from 0 to 1."""
    count = like.numel()
    if like.dtype == torch.bool:
        return torch.ones(count, dtype=torch.bool)
    pool = _UNIFORM if like.dtype.is_floating_point else _BYTES
    pool = pool if count <= len(pool) else pool.repeat(-(-count // len(pool)))
    return pool[:count].to(like.dtype)


class _Module(python_backend.Module):
    def current_stream(self) -> Stream:
        return QUEUES.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, QUEUES.current = QUEUES.current, stream
        try:
            yield
        finally:
            QUEUES.current = before

    def synchronize(self, device: object = None) -> None:
        QUEUES.synchronise()


def register() -> torch.device:
    return python_backend.register(NAME, _Module(Stream, Event), QUEUES.synchronise, Held.like, _copy, "meta")
