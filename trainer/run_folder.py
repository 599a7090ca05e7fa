"""The run folder: on a file system it is used as it is; on object storage its files are written here and uploaded.

DeepSpeed, TensorBoard and appended logs need POSIX files. A run on object storage therefore has a staging folder on
every node: what is written there is uploaded before each commit and at the end, and fetched again by the next launch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from lacuna.basics import storage
from lacuna.basics.errors import UserError

if TYPE_CHECKING:
    from lacuna.trainer.world import World

CONFIG, METRICS, BAD_SAMPLES, LOG, TRACE = "config.yaml", "metrics.jsonl", "bad_samples.jsonl", "log.txt", "trace"
LOGGERS = "loggers.json"  # what services call this run (loggers/)
_CHECKPOINTS = "checkpoints"  # uploaded by themselves (checkpoints/files.py)


class RunFolder:
    """`url` is where the run lives; `local` is where this process reads and writes its files."""

    def __init__(self, url: str, world: World, staging: str | None = None):
        self.url, self.world = url, world
        self.remote = not storage.is_local(url)
        self.local = _staging_of(url, staging) if self.remote else storage.local_path(url)
        self.before_push: Callable[[], None] = lambda: None
        self._pushed: dict[str, tuple[int, int]] = {}  # name → size and time of change when it was uploaded
        self._lock: IO[bytes] | None = None
        if self.remote:
            if world.leads_node:
                self._take_staging()
            world.barrier()
            self._fetch()

    def path(self, *parts: str) -> str:
        return os.path.join(self.local, *parts)

    @property
    def trace_name(self) -> str:
        return f"{TRACE}/rank-{self.world.rank}.jsonl"

    def push(self) -> None:
        """Upload what this rank wrote since the last time."""
        if not self.remote:
            return
        self.before_push()
        for name in self._mine():
            facts = os.stat(self.path(name))
            seen = (facts.st_size, facts.st_mtime_ns)
            if self._pushed.get(name) != seen:
                storage.upload(self.path(name), storage.join(self.url, name))
                self._pushed[name] = seen

    def close(self) -> None:
        """Upload the rest and leave nothing behind on this node."""
        self.push()
        self.world.barrier()
        if self.remote and self.world.leads_node:
            shutil.rmtree(self.local, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Another launch may stage here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _mine(self) -> list[str]:
        """Rank 0 writes everything but the other ranks' traces."""
        if not self.world.main:
            return [self.trace_name] if os.path.exists(self.path(self.trace_name)) else []
        found = []
        for base, folders, names in os.walk(self.local):
            if base == self.local:
                folders[:] = [name for name in folders if name not in (_CHECKPOINTS, TRACE)]
            found += [os.path.relpath(os.path.join(base, name), self.local) for name in names]
        return found + ([self.trace_name] if os.path.exists(self.path(self.trace_name)) else [])

    def _fetch(self) -> None:
        """What an earlier launch wrote and this one goes on with."""
        names = [CONFIG, METRICS, BAD_SAMPLES, LOG, LOGGERS] if self.world.main else []
        for name in [*names, self.trace_name]:
            with contextlib.suppress(FileNotFoundError):
                storage.download(storage.join(self.url, name), self.path(name))

    def _take_staging(self) -> None:
        """Empty it: what a killed launch left there is on object storage, or was never committed."""
        try:
            os.makedirs(os.path.dirname(self.local), exist_ok=True)
            # Beside the folder, which comes and goes. The kernel drops the lock when its holder dies.
            self._lock = open(self.local + ".lock", "wb")  # noqa: SIM115 - held until close
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.local, ignore_errors=True)
            os.makedirs(self.local)
        except BlockingIOError:
            raise UserError(f"{self.url}: another launch of this run is at work on this machine. End it first, or use "
                            "another name=….") from None
        except OSError as error:
            raise UserError(f"{self.local}: cannot stage the files of {self.url} here ({error.strerror}). Set "
                            "train.staging to a folder with room for a checkpoint of every rank.") from None


def _staging_of(url: str, staging: str | None) -> str:
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    return os.path.join(staging or os.path.join(tempfile.gettempdir(), f"lacuna-staging-{os.getuid()}"), name)
