"""A crew of this process that keeps what it did, and a watcher that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable

from lacuna.tools.trials import crew
from lacuna.tools.trials.job import Job, Outcome


class HereCrew(crew.HereCrew):
    def __init__(self, before: Callable[[Job], None] = lambda job: None):
        """`before` is told of every job that is about to be done, and may raise."""
        super().__init__()
        self.done: list[str] = []
        self._before = before

    def ended(self) -> list[tuple[Job, Outcome | str]]:
        assert self._next is not None
        self._before(self._next[0])
        found = super().ended()
        self.done += [job.label for job, _ in found]
        return found


class Quiet:
    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def began(self, job: Job) -> None:
        pass

    def ended(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.label] = outcome

    def look(self, running: list[Job], waiting: list[Job]) -> None:
        pass
