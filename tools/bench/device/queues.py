"""The clock of a virtual accelerator: when its queues are busy, computed from when the host gives them work.

A queue that is given work at time t finishes it at max(t, when it is free) + how long the work takes. No thread and no
core is needed for that, so the host alone decides how often the queue runs empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

COPY_BYTES_PER_SECOND = 12e9
MOST_AHEAD = 0.1  # seconds of queued work; a driver's queue of launches is bounded too


class Stream:
    """Work in order: `ready` is when the last of it ends."""

    def __init__(self, device: object = None):
        self.ready = 0.0

    def wait_stream(self, other: Stream) -> None:
        self.ready = max(self.ready, other.ready)

    def wait_event(self, event: Event) -> None:
        self.ready = max(self.ready, event.time)


class Event:
    """A point of a stream."""

    def __init__(self) -> None:
        self.time = 0.0

    def record(self, stream: Stream) -> None:
        self.time = stream.ready

    def synchronize(self) -> None:
        QUEUES.until(self.time)


@dataclass(frozen=True)
class StepEnd:
    """When the device has done a step, and by then, since the process began:"""

    time: float
    synchronisations: int
    idle_after_them: float
    main_thread: float  # CPU seconds
    process: float

    def __sub__(self, other: StepEnd) -> StepEnd:
        return StepEnd(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Queues:
    """Compute, and copies beside it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        self.now, self.sleep = now, sleep
        self.main = Stream()
        self.current = self.main
        self.copies_free = 0.0
        self.synchronisations = 0
        self.idle_after_them = 0.0  # seconds in which the compute queue was empty because the host had waited for it
        self.waited = False
        self.ends: list[StepEnd] = []
        self.lock = threading.RLock()

    def compute(self, seconds: float) -> None:
        with self.lock:
            now = self.now()
            idle = now - self.main.ready
            if self.waited and idle > 0:
                self.idle_after_them += idle
            self.waited = False
            self.main.ready = max(now, self.main.ready) + seconds
        self.until(self.main.ready - MOST_AHEAD)

    def copy(self, size: int) -> None:
        """On the current stream."""
        with self.lock:
            start = max(self.now(), self.current.ready, self.copies_free)
            self.current.ready = self.copies_free = start + size / COPY_BYTES_PER_SECOND

    def synchronise(self) -> None:
        """The host waits until nothing is left to do."""
        self.synchronisations += 1
        self.waited = True
        self.until(max(self.main.ready, self.copies_free))

    def until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:
            self.sleep(left)

    def end_step(self) -> None:
        self.ends.append(StepEnd(self.main.ready, self.synchronisations, self.idle_after_them, time.thread_time(),
                                 time.process_time()))


QUEUES = Queues()
