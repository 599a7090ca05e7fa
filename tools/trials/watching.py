"""What people see of the work: a live table on a terminal, a plain line per event elsewhere, and both in log.txt."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from lacuna.basics import storage
from lacuna.basics.clock import clock
from lacuna.tools.trials.job import Job, Outcome, epoch_lines, read_curve
from lacuna.trainer.config.sections import Config

_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_BETWEEN_LINES = 60.0
_SHOWN = 12  # running jobs of the live table


class Watching:
    """`left(jobs)`: epochs of jobs and of what will follow from them, as far as is known, for the time left."""

    def __init__(self, folder: str, left: Callable[[list[Job]], float], best: Callable[[], str], slots: int):
        self._left, self._best, self._slots = left, best, slots
        self._log: TextIO | None = None
        if storage.is_local(folder):
            self._log = open(os.path.join(storage.local_path(folder), "log.txt"), "a", encoding="utf-8")  # noqa: SIM115
        self._live, self._drawn = sys.stderr.isatty(), 0
        self._looked = self._lined = 0.0
        self._running: list[Job] = []
        self._waiting: list[Job] = []
        self._began: dict[str, tuple[float, int]] = {}  # time, epochs it had then
        self._epoch_seconds: list[float] = []

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self._wipe()
        if self._log is not None:
            self._log.close()

    def say(self, text: str) -> None:
        self._wipe()
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, file=sys.stderr, flush=True)
        if self._log is not None:
            print(f"{time.strftime('%Y-%m-%d')} {line}", file=self._log, flush=True)

    def began(self, job: Job) -> None:
        self._began[job.label] = (time.monotonic(), len(epoch_lines(job.config.folder)))

    def ended(self, job: Job, outcome: Outcome) -> None:
        since, before = self._began.pop(job.label)
        self._running = [other for other in self._running if other.label != job.label]
        epochs = len(epoch_lines(job.config.folder)) - before
        if epochs > 0:
            self._epoch_seconds.append((time.monotonic() - since) / epochs)
        what = {"finished": "finished", "paused": f"{job.epochs} epochs", "stopped": "stopped, to go on from there",
                "failed": f"failed: {outcome.reason}", "refused": ""}[outcome.status]
        score = "" if outcome.score is None else f", val mAP {outcome.score:.2f}"
        self.say(f"{job.name}: {what}{score}{self._time_left()}")

    def look(self, running: list[Job], waiting: list[Job]) -> None:
        now, self._running, self._waiting = time.monotonic(), running, waiting
        if self._live and now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._draw(running, waiting)
        elif not self._live and now - self._lined >= _SECONDS_BETWEEN_LINES:
            if self._lined:
                self.say(f"{len(running)} at work, {len(waiting)} waiting{self._time_left()}")
            self._lined = now

    def _time_left(self) -> str:
        if not self._epoch_seconds:
            return ""
        mean = sum(self._epoch_seconds) / len(self._epoch_seconds)
        done = sum(len(epoch_lines(job.config.folder)) - self._began[job.label][1] for job in self._running
                   if job.label in self._began)
        left = max(0.0, self._left([*self._running, *self._waiting]) - done)
        return f"; about {clock(left * mean / self._slots)} left"

    def _draw(self, running: list[Job], waiting: list[Job]) -> None:
        lines = [f"{len(running)} at work, {len(waiting)} waiting{self._time_left()}. {self._best()}"]
        for job in running[:_SHOWN]:
            with contextlib.suppress(OSError, ValueError):
                done, (curve, best) = len(epoch_lines(job.config.folder)), read_curve(job.config.folder)
                score = f"val mAP {curve[-1]:6.2f}, best {best:6.2f}" if curve else ""
                lines.append(f"  {job.name:<28} epoch {done:>3} of {job.epochs or all_epochs(job.config):>3}  {score}")
        self._wipe()
        width = max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
        print("\n".join(line[:width] for line in lines), file=sys.stderr, flush=True)
        self._drawn = len(lines)

    def _wipe(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}F\x1b[J", end="", file=sys.stderr, flush=True)
            self._drawn = 0


def all_epochs(config: Config) -> int:
    return sum(phase.epochs for phase in config.phases)
