"""How fast training goes, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Iterator

from lacuna.basics.clock import clock
from lacuna.data_pipelines.batch import Batch


class Pace:
    """Samples, seconds and waiting for data since the last log line."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.since, self.waited, self.samples = time.monotonic(), 0.0, 0

    def waiting_for(self, batches: Iterator[Batch]) -> Batch:
        before = time.monotonic()
        batch = next(batches)
        self.waited += time.monotonic() - before
        return batch

    def samples_per_second(self) -> float:
        return self.samples / max(time.monotonic() - self.since, 1e-9)


class Remaining:
    """Time left from the pace of this launch, without the first steps (compilation, cold caches).

    The epoch's end is told from the pace of its steps; the run's from all that happened since the first steps, so that
    evaluations and checkpoints count.
    """

    WARM_UP = 3

    def __init__(self) -> None:
        self.run = Stopwatch(self.WARM_UP)
        self.epoch = Stopwatch(self.WARM_UP)
        self.left = self.after = 0

    def begin_epoch(self, left: int, after: int) -> None:
        """`left` steps of this epoch, `after` more in later ones."""
        self.epoch, self.left, self.after = Stopwatch(self.WARM_UP), left, after

    def tick(self) -> None:
        self.left -= 1
        self.epoch.tick()
        self.run.tick()

    def text(self) -> str:
        text = f"{clock(self.left * self.epoch.seconds_per_step())} left in this epoch"
        if not self.after:
            return text
        return f"{text}, about {clock((self.left + self.after) * self.run.seconds_per_step())} in all"


class Stopwatch:
    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.ticks, self.since = warm_up, 0, time.monotonic()

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == self.warm_up:
            self.since = time.monotonic()

    def seconds_per_step(self) -> float:
        counted = self.ticks - self.warm_up if self.ticks > self.warm_up else self.ticks
        return (time.monotonic() - self.since) / max(1, counted)
