"""The same measure on a real GPU, by torch's own profiler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lacuna.tools.bench.device.measuring import Found
from lacuna.trainer.phase import Phase

# What the host calls to wait; waiting for an event of an earlier step leaves the device with work, and is not one.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "hipStreamSynchronize", "hipDeviceSynchronize")


class GpuMeter:
    """Profiles the optimizer steps that are asked for."""

    def around(self) -> AbstractContextManager:
        return contextlib.nullcontext()

    def attach(self, phase: Phase, first: int, last: int) -> None:
        self.batch, self.step, self.first, self.last = phase.config.batch, 0, first, last
        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        phase.engine.optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_) -> None:
        self.step += 1
        if self.step == self.first:
            torch.cuda.synchronize()
            self.profile.start()
            self.began = time.perf_counter()
        elif self.step == self.last:
            torch.cuda.synchronize()
            self.wall = time.perf_counter() - self.began
            self.profile.stop()

    def found(self, first: int, last: int) -> Found:
        steps, events = self.last - self.first, self.profile.events() or []
        work = [(event.time_range.start, event.time_range.end) for event in events
                if event.device_type == DeviceType.CUDA]
        waits = sum(event.name in _WAITS for event in events) - 1  # the last one is this class's own
        return Found(covered(work) * 1e-6 / self.wall,
                     {"samples_per_second": steps * self.batch / self.wall, "synchronisations": waits / steps})


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
