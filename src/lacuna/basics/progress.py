"""Progress with an ETA: a bar on a terminal, an occasional plain line elsewhere (a bar floods a Slurm log)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from lacuna.basics.clock import clock

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """`with Progress(total, "packing") as meter: meter.advance(10)`; everything goes to stderr."""

    def __init__(self, total: int | None, label: str, unit: str = "it"):
        self.total, self.label, self.unit = total, label, unit
        self.done = self._said = 0
        self._bar = tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True) if sys.stderr.isatty() else None
        self._started = self._last_line = time.monotonic()

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind, value, trace) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None and (self.done != self._said or not self.done):
            self._line()

    def _line(self) -> None:
        self._last_line, self._said = time.monotonic(), self.done
        seconds = self._last_line - self._started
        rate = self.done / seconds if seconds > 0 else 0.0
        text = f"{self.label}: {self.done:,}{f' of {self.total:,}' if self.total is not None else ''} {self.unit}"
        text += f", {rate:,.0f} {self.unit}/s, {clock(seconds)} elapsed"
        if self.total is not None and rate > 0 and self.done < self.total:
            text += f", {clock((self.total - self.done) / rate)} left"
        print(text, file=sys.stderr, flush=True)


def progress(iterable: Iterable[T], total: int | None, label: str, unit: str = "it") -> Iterator[T]:
    """Yield from the iterable and show how far it has come."""
    with Progress(total, label, unit) as meter:
        for item in iterable:
            yield item
            meter.advance()
