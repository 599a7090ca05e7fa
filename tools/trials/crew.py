"""The crew on Ray: workers that each do one job at a time, here or on a cluster, until nothing is left to do.

Ray Tune is not used. A search here must promise that a kill at any moment repeats nothing and that its decisions do
not depend on who did what when, and a paper's table must go the same way. The trainer's own checkpoints and a ledger of
finished jobs give the first, decisions made once all trials of a rung are in give the second, and plain Ray tasks are
all that is left to need. Tune would bring a second kind of checkpoint, saved every now and then, and decisions that
depend on which trial reports first.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from lacuna.basics.errors import UserError
from lacuna.tools.passes.pool import PoolSettings, ray_room
from lacuna.tools.trials.job import Job, Outcome, perform
from lacuna.tools.trials.ledger import Ledger

_ATTEMPTS = 3  # deaths of workers over one job: more is no accident
_PATIENCE_SECONDS = 1.0
_REUSES = 40  # jobs of one worker process: imports cost seconds, what libraries leak adds up


@dataclass(frozen=True)
class CrewSettings:
    workers: int | None = None  # jobs at a time; default: as many as there are GPUs, or cores; 0: in this process
    ranks: int = 1  # of each job
    address: str | None = None  # of a running Ray cluster


def add_crew_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Ray")
    group.add_argument("--workers", type=int, metavar="N", help="trainings at a time (default: one per GPU, or one per "
                       "core without GPUs; more than GPUs: several share one; 0: in this process, without Ray)")
    group.add_argument("--ranks", type=int, default=1, metavar="N", help="of each training, a GPU each (default 1)")
    group.add_argument("--address", help="a running Ray cluster, e.g. auto or HOST:6379; data and folders must be on "
                       "storage that all its nodes see (default: this machine alone)")


def crew_settings(args: argparse.Namespace) -> CrewSettings:
    for flag, value, least in (("--workers", args.workers, 0), ("--ranks", args.ranks, 1)):
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: must be {least} or more.")
    return CrewSettings(args.workers, args.ranks, args.address)


class Crew(Protocol):
    slots: int  # jobs at a time

    def begin(self, job: Job, seconds_before: float) -> None: ...

    def ended(self) -> list[tuple[Job, Outcome | str]]:
        """Jobs that have ended since, after a short wait; text instead of an outcome: the worker died, and why."""
        ...


class Work(Protocol):
    """What is to be done: it is told every outcome and answers with the jobs that follow from it."""

    def begin(self) -> list[Job]: ...

    def done(self, job: Job, outcome: Outcome) -> list[Job]: ...


class Watcher(Protocol):
    def began(self, job: Job) -> None: ...

    def ended(self, job: Job, outcome: Outcome) -> None: ...

    def look(self, running: list[Job], waiting: list[Job]) -> None: ...


def work_through(work: Work, ledger: Ledger, crew: Crew, watcher: Watcher,
                 after: Callable[[], object] = lambda: None) -> bool:
    """Do everything that the ledger does not have yet; False if it was stopped before its end. `after` is called when
    an outcome is new."""
    waiting, running, deaths = deque(work.begin()), dict[str, Job](), Counter[str]()
    whole = True
    while waiting or running:
        while waiting and len(running) < crew.slots:
            job = waiting.popleft()
            known = ledger.outcome(job)
            if known is not None:
                waiting.extendleft(reversed(work.done(job, known)))
                continue
            if job.deadline is not None and time.time() >= job.deadline:
                whole = False
                continue
            running[job.label] = job
            watcher.began(job)
            crew.begin(job, ledger.seconds(job.name))
        watcher.look(list(running.values()), list(waiting))
        for job, outcome in crew.ended() if running else []:
            del running[job.label]
            if isinstance(outcome, str):
                deaths[job.label] += 1
                if deaths[job.label] < _ATTEMPTS:
                    waiting.appendleft(job)  # it goes on from its checkpoint
                    continue
                outcome = Outcome("failed", reason=f"its worker died {_ATTEMPTS} times: {outcome}", key=job.key)
            if outcome.status == "refused":
                raise UserError(f"{job.name}: {outcome.reason}. Then give the same command again: it goes on.")
            watcher.ended(job, outcome)
            if outcome.status == "stopped":
                whole = False
                continue
            ledger.write(job, outcome)
            waiting.extendleft(reversed(work.done(job, outcome)))
            after()
    return whole


class RayCrew:
    def __init__(self, settings: CrewSettings):
        import ray

        self._ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        places = [int(node.get("GPU" if gpus else "CPU", 0)) for node in nodes]
        # A job is of one node: Ray would wait for ever for a larger one. A cluster without any may still grow.
        if 0 < max(places) < settings.ranks:
            raise UserError(f"--ranks {settings.ranks}: the largest node that Ray has here has {max(places)} "
                            f"{'GPUs' if gpus else 'cores'}; a trial trains on one node. Use at most so many.")
        self.slots = settings.workers or max(1, sum(place // settings.ranks for place in places))
        share = settings.ranks if settings.ranks > 1 else min(1.0, gpus / self.slots)
        cores = [int(node.get("CPU", 1)) for node, place in zip(nodes, places, strict=True) if place >= settings.ranks]
        # On a GPU every job has a process of its own: what the one before it left on the device must be gone.
        self._task: Any = ray.remote(num_cpus=max(1, min([settings.ranks, *cores])), num_gpus=share if gpus else 0,
                                     max_retries=0, max_calls=1 if gpus else _REUSES)(perform)
        self._running: dict[Any, Job] = {}

    def begin(self, job: Job, seconds_before: float) -> None:
        self._running[self._task.remote(job, seconds_before)] = job

    def ended(self) -> list[tuple[Job, Outcome | str]]:
        ready, _ = self._ray.wait(list(self._running), timeout=_PATIENCE_SECONDS)
        return [(self._running.pop(call), self._result(call)) for call in ready]

    def _result(self, call: Any) -> Outcome | str:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as death:
            return str(death).strip().partition("\n")[0]


class HereCrew:
    """This process, one job after another: for a debugger, and where starting Ray costs more than the work."""

    slots = 1

    def __init__(self) -> None:
        self._next: tuple[Job, float] | None = None

    def begin(self, job: Job, seconds_before: float) -> None:
        self._next = (job, seconds_before)

    def ended(self) -> list[tuple[Job, Outcome | str]]:
        import torch

        assert self._next is not None, "begin comes first"
        job, seconds = self._next
        threads = torch.get_num_threads()
        torch.set_num_threads(job.ranks)  # as Ray's workers have it: sums then have one order
        try:
            outcome = perform(job, seconds)
        finally:
            torch.set_num_threads(threads)
        if outcome.status == "stopped" and (job.deadline is None or time.time() < job.deadline):
            raise KeyboardInterrupt  # it was this process that was asked to stop
        return [(job, outcome)]


@contextlib.contextmanager
def open_crew(settings: CrewSettings) -> Iterator[Crew]:
    if settings.workers == 0:
        yield HereCrew()
        return
    workers = None if settings.workers is None else settings.workers * settings.ranks
    with ray_room(PoolSettings(workers, settings.address)):
        yield RayCrew(settings)
