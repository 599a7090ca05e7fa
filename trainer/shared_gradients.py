"""Gradients averaged through shared memory, where all ranks are processes of one machine and train on its cores.

Through sockets every number is copied four times, by cores that have other things to do. Here a rank puts its gradients
into memory that all ranks see, adds up its part of everybody's, and writes the averages to everybody.
"""

from __future__ import annotations

import functools
import mmap
import os
from typing import Any

import torch

from lacuna.trainer.gradients import sendable
from lacuna.trainer.peers import machine
from lacuna.trainer.world import World

_PIECE = 1 << 15  # numbers of every rank that are added up at a time: they stay in the cache


def shared_slots(world: World, count: int) -> list[torch.Tensor] | None:
    """float32 [count] of every rank, in memory that all of them see; None, on all ranks, if one of them cannot.

    The memory has no name in any file system: it is gone with the last process, however that ends.
    """
    mine = _reserve(4 * count)
    places = world.gather((machine(), os.getpid(), mine))
    slots = _open_all(places, count)
    everywhere = all(world.gather(slots is not None))  # and from here on nobody needs the handles any more
    if mine is not None:
        os.close(mine)
    return slots if everywhere else None


def _reserve(size: int) -> int | None:
    try:
        handle = os.memfd_create("gradients", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not this system, or a sandbox without this call
        return None
    os.ftruncate(handle, size)  # pages come with the first gradients, out of the same memory as theirs
    return handle


def _open_all(places: list[tuple[Any, int, int | None]], count: int) -> list[torch.Tensor] | None:
    if any(where != places[0][0] or handle is None for where, _, handle in places):
        return None
    slots = []
    for _, process, number in places:
        try:
            with open(f"/proc/{process}/fd/{number}", "r+b", buffering=0) as f:
                slots.append(torch.frombuffer(mmap.mmap(f.fileno(), 4 * count), dtype=torch.float32))
        except (OSError, ValueError):
            return None
    return slots


class SharedExchange:
    """A gradient goes to this rank's slot as soon as the backward has it. Afterwards every rank makes the averages of
    its part of the numbers, the ranks' values added in their order, and writes them into all slots: into each but its
    own it writes only while all ranks do that."""

    def __init__(self, engine: Any, world: World, slots: list[torch.Tensor]):
        self.engine, self.world, self.slots = engine, world, slots
        self.learning = sendable(engine.module)
        self.hooks = [p.register_post_accumulate_grad_hook(self._put) for p in self.learning]

    def close(self) -> None:
        """The model may learn on in another phase."""
        for hook in self.hooks:
            hook.remove()

    @functools.cached_property
    def homes(self) -> dict[torch.Tensor, torch.Tensor]:
        """Where a parameter's gradient lies in this rank's slot, in the memory order of the parameter."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        at = 0
        for parameter in self.learning:
            found[parameter] = torch.as_strided(self.slots[self.world.rank], parameter.shape, parameter.stride(), at)
            at += parameter.numel()
        return found

    def _put(self, parameter: torch.Tensor) -> None:
        if self.engine.is_gradient_accumulation_boundary():
            assert parameter.grad is not None  # that is when hooks are called
            self.homes[parameter].copy_(parameter.grad)
            parameter.grad = self.homes[parameter]

    def finish(self) -> None:
        """After the backward: everybody's averages, where the optimizer looks."""
        if not self.engine.is_gradient_accumulation_boundary():
            return
        for parameter, home in self.homes.items():
            if parameter.grad is None:  # another rank may have one
                parameter.grad = home.zero_()
        self.world.barrier()
        size, count = self.world.size, len(self.slots[0])
        for start in range(count * self.world.rank // size, end := count * (self.world.rank + 1) // size, _PIECE):
            first, *others = [slot[start : min(start + _PIECE, end)] for slot in self.slots]
            for other in others:
                first += other
            first *= 1.0 / size
            for other in others:
                other.copy_(first)
        self.world.barrier()

