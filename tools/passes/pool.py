"""The Ray pool: actors that are built once and take shard numbers one at a time, until every shard has its part file.

A worker that dies (killed, out of memory, its node lost) is replaced, and its shard goes to whoever is free next; the
shard's part file appears once, by rename, so nothing is counted twice. Results never travel through Ray: the driver
reduces the part files in shard order, so numbers do not depend on the number of workers, nodes or deaths.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.progress import Progress
from lacuna.tools.passes.parts import Parts, absolute
from lacuna.tools.run_files import parts_folder

_ATTEMPTS = 3  # deaths of workers over one shard, or while starting: more is no accident
_OBJECT_STORE_BYTES = 128 << 20  # only the job itself travels through it
_LONGEST_TEMPORARY = 40  # Ray puts sockets below its folder, and a socket's path has at most 107 characters
_PATIENCE_SECONDS = 30.0
_KNOCK_SECONDS = 10.0


class Job(Protocol):
    """What a pass does; pickled to every worker. `build` loads the model once, its answer is called for each shard."""

    @property
    def fingerprint(self) -> str: ...

    def build(self) -> Callable[[int], Mapping[str, np.ndarray]]: ...


@dataclass(frozen=True)
class PoolSettings:
    workers: int | None = None  # default: one per GPU, or one per core
    address: str | None = None  # of a running Ray cluster; default: an own one on this machine
    parts: str | None = None  # where per-shard results are kept; default: they are removed at the end

    def folder(self, run: str) -> str:
        """Where the per-shard results of a pass with a run's model are written."""
        return self.parts or parts_folder(run, shared=self.address is not None)


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Ray")
    group.add_argument("--workers", type=int, metavar="N", help="default: one per GPU, or one per core without GPUs")
    group.add_argument("--address", help="a running Ray cluster, e.g. auto or HOST:6379 (default: this machine alone)")
    group.add_argument("--parts", metavar="URL", help="folder for per-shard results, shared by all nodes; kept, so "
                       "that a rerun reuses them (default: removed at the end; until then in the run folder, or in "
                       "this machine's temporary one if that is on object storage and there is no --address)")


def pool_settings(args: argparse.Namespace) -> PoolSettings:
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: at least 1 is needed.")
    return PoolSettings(args.workers, args.address, args.parts)


class Pool:
    """Use inside `with open_pool(settings) as pool`. Ray takes seconds to start, so it waits for the first work."""

    def __init__(self, settings: PoolSettings, open_things: contextlib.ExitStack):
        self._settings, self._open_things = settings, open_things
        self._room: Room | None = None

    @property
    def room(self) -> Room:
        if self._room is None:
            self._room = self._open_things.enter_context(ray_room(self._settings))
        return self._room

    def run(self, job: Job, rows: Mapping[int, int], folder: str, label: str) -> Parts:
        """Make sure that every shard of `rows` (shard → its samples, for the progress) has its part in the folder."""
        parts = Parts(absolute(folder), job.fingerprint)
        finished = parts.finished(list(rows))
        todo = [shard for shard in rows if shard not in finished]
        if todo:
            with Progress(sum(rows.values()), label, "samples") as meter:
                meter.advance(sum(rows[shard] for shard in finished))
                _Round(self.room, job, parts, todo, lambda shard: meter.advance(rows[shard])).run()
        return parts


@dataclass(frozen=True)
class Room:
    """What Ray has for us."""

    workers: int
    gpus: bool


class _Round:
    """One job over some shards."""

    def __init__(self, room: Room, job: Job, parts: Parts, todo: list[int], done: Callable[[int], None]):
        import ray

        self.ray, self.done = ray, done
        self.todo = deque(todo)
        self.deaths: Counter[int | None] = Counter()  # by shard; None: while starting
        self.in_flight: dict[Any, tuple[Any, int | None]] = {}  # call → (actor, shard; None: it is starting)
        self.count = min(room.workers, len(todo))
        # max_restarts is left at 0: a replacement is started here, and the shard need not wait for it.
        worker = ray.remote(_Worker).options(num_cpus=1, num_gpus=1 if room.gpus else 0)
        shared = ray.put(job)
        self.start = lambda: worker.remote(shared, parts)

    def run(self) -> None:
        actors = [self._begin() for _ in range(self.count)]
        try:
            while self.todo or any(shard is not None for _, shard in self.in_flight.values()):
                ready, _ = self.ray.wait(list(self.in_flight), timeout=_PATIENCE_SECONDS)
                if not ready and all(shard is None for _, shard in self.in_flight.values()):
                    print(f"waiting for Ray to start {len(self.in_flight)} workers: its nodes may be busy "
                          "(`ray status` shows them)", file=sys.stderr)
                for call in ready:
                    actor, shard = self.in_flight.pop(call)
                    if not self._settle(call, shard):
                        actor = self._begin()
                        actors.append(actor)
                    elif self.todo:
                        self._give(actor, self.todo.popleft())
        finally:
            for actor in actors:
                self.ray.kill(actor)

    def _begin(self) -> Any:
        actor: Any = self.start()
        # Only a worker that has answered gets a shard: one that finds no room in the cluster must not hold one up.
        self.in_flight[actor.ready.remote()] = (actor, None)
        return actor

    def _give(self, actor: Any, shard: int) -> None:
        self.in_flight[actor.process.remote(shard)] = (actor, shard)

    def _settle(self, call: Any, shard: int | None) -> bool:
        """Take note of how a call ended; False if its worker is dead."""
        try:
            problem = self.ray.get(call)
        except self.ray.exceptions.RayActorError as death:
            self._mourn(shard, death)
            return False
        if problem is not None:
            raise UserError(problem)
        if shard is not None:
            self.done(shard)
        return True

    def _mourn(self, shard: int | None, death: Exception) -> None:
        self.deaths[shard] += 1
        if self.deaths[shard] >= _ATTEMPTS:
            what = "while starting" if shard is None else f"over shard {shard}"
            reason = str(death).strip().rsplit("\n", 1)[-1].strip().rstrip(".")
            raise UserError(f"{self.deaths[shard]} workers died {what} ({reason}). If memory is short, use fewer "
                            "--workers. Finished shards are kept: run again to go on.")
        if shard is not None:
            self.todo.appendleft(shard)


class _Worker:
    """A Ray actor. User errors travel as text: an exception would come back as Ray's own kind, with a trace."""

    def __init__(self, job: Job, parts: Parts):
        self.job, self.parts = job, parts
        self.work: Callable[[int], Mapping[str, np.ndarray]] | None = None

    def ready(self) -> None:
        return None

    def process(self, shard: int) -> str | None:
        try:
            if self.work is None:
                self.work = self.job.build()
            self.parts.write(shard, self.work(shard))
        except UserError as error:
            return str(error)
        except OSError as error:  # a full disk, a folder that may not be written
            return f"shard {shard}, on {os.uname().nodename}: {error}"
        return None


@contextlib.contextmanager
def open_pool(settings: PoolSettings) -> Iterator[Pool]:
    with contextlib.ExitStack() as open_things:
        yield Pool(settings, open_things)


@contextlib.contextmanager
def ray_room(settings: PoolSettings) -> Iterator[Room]:
    """An own local Ray, a cluster's, or the one that this process already uses (which is then left running)."""
    import ray

    if ray.is_initialized():
        yield _room(settings)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    temporary = None
    try:
        if settings.address:
            _connect(settings.address, common)
        else:
            temporary = _temporary_folder()
            _start(settings.workers or os.cpu_count() or 1, temporary, common)
        yield _room(settings)
    finally:
        ray.shutdown()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _start(cores: int, temporary: str, common: dict[str, Any]) -> None:
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _workers_import_the_same():
                ray.init(address="local", num_cpus=cores, include_dashboard=False, _temp_dir=temporary,
                         object_store_memory=_OBJECT_STORE_BYTES, **common)
            return
        except Exception as error:  # Ray gives its processes 30 s, and has no exception of its own for more
            if "timed out during startup" not in str(error):
                raise
            if attempt == _ATTEMPTS:
                raise UserError(f"Ray did not start in 30 s, {attempt} times in a row: this machine is too busy. Try "
                                "again later, or use a cluster with --address.") from None


@contextlib.contextmanager
def _workers_import_the_same() -> Iterator[None]:
    """Ray's processes inherit the environment: they are to find every module where this process does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _connect(address: str, common: dict[str, Any]) -> None:
    import ray

    try:
        _knock(address)
        ray.init(address=address, **common)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--address {address}: no Ray cluster answers there ({reason}). Start one with `ray start "
                        "--head`, or leave --address out to use this machine. One that asks for a token needs "
                        "RAY_AUTH_MODE and RAY_AUTH_TOKEN here as on its nodes.") from None


def _knock(address: str) -> None:
    """Ray tries for minutes before it says that nobody listens."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()


def _room(settings: PoolSettings) -> Room:
    import ray

    there = ray.cluster_resources()
    gpus, cores = int(there.get("GPU", 0)), int(there.get("CPU", 1))
    most = gpus or max(1, cores)
    return Room(min(settings.workers or most, most), gpus > 0)


def _temporary_folder() -> str:
    root = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="lacuna-ray-", dir=root if len(root) <= _LONGEST_TEMPORARY - 20 else "/tmp")
