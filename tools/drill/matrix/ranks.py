"""Launches whose ranks are forked from this process, which has imported everything: starting one takes a second.

This process must stay without threads: whatever needs some (gloo, s3fs, the store) is done in a child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from lacuna.tools.drill.matrix.events import Events
from lacuna.tools.launches import free_port
from lacuna.trainer import loop, run

_PATIENCE_SECONDS = 600


class Ranks:
    """One launch: `arguments` are those of trainer/run.py. Rank `victim` dies at storage event `deadly` (0: never)."""

    def __init__(self, arguments: list[str], ranks: int, output: str, deadly: int = 0, victim: int = 0,
                 everybody: bool = False, stop_after: int | None = None):
        self.output, self.began = output, time.monotonic()
        open(output, "wb").close()
        self.events, self.codes = Events(ranks), dict[int, int]()
        self.ended: list[float] = []  # seconds after the beginning, of every rank in the order in which they ended
        port, self.pids = str(free_port()), list[int]()
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                with _last_word(output):
                    os.setpgid(0, self.pids[0] if self.pids else 0)
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                    if stop_after is not None:
                        _stop_after(stop_after)
                    self.events.watch(rank, deadly if rank == victim else 0, everybody)
                    os._exit(run.main(arguments))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)

    def text(self) -> str:
        with open(self.output, encoding="utf-8", errors="replace") as f:
            return f.read()

    def poll(self) -> bool:
        """Whether all have ended."""
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
                    self.ended.append(time.monotonic() - self.began)
        return len(self.codes) == len(self.pids)

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> bool:
        """Until all have ended by themselves; False, and they are killed, when they take too long."""
        end = time.monotonic() + seconds
        while not self.poll():
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                while not self.poll():
                    time.sleep(0.01)
                return False
            time.sleep(0.005)
        return True

    def signal(self, number: int, rank: int | None = None) -> bool:
        """To one rank or to all; whether anybody was there."""
        self.poll()
        chosen = [pid for n, pid in enumerate(self.pids) if rank in (None, n) and pid not in self.codes]
        for pid in chosen:
            os.kill(pid, number)
        return bool(chosen)

    @property
    def finished(self) -> bool:
        return set(self.codes.values()) == {0}

    @property
    def killed(self) -> int:
        return sum(code == -signal.SIGKILL for code in self.codes.values())


class ChildFailed(RuntimeError):
    """A process that helps the drill did not do what it should have."""


def in_child(work: Callable[[], Any], output: str) -> Any:
    """What `work` returns, as JSON, from a process of its own."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        with _last_word(output):
            os.close(receive)
            with os.fdopen(send, "w", encoding="utf-8") as out:
                json.dump(work(), out)
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, encoding="utf-8") as answer:
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        with open(output, encoding="utf-8", errors="replace") as f:
            raise ChildFailed(f"a helping process ended with {code}:\n{f.read()[-3000:]}")
    return json.loads(text)


def import_everything(arguments: list[str], output: str) -> None:
    """Everything that a run imports on its way, as a run in a child finds out: here once, instead of in every rank."""
    def modules() -> list[str]:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(free_port())}
        if run.main(arguments) != 0:
            raise RuntimeError("the first run failed")
        return list(sys.modules)

    for name in in_child(modules, output):
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # some names are no modules
                importlib.import_module(name)
    assert threading.active_count() == 1, "an import started a thread, which forks would lose"


@contextlib.contextmanager
def _last_word(output: str) -> Iterator[None]:
    """A forked child writes to its own file and never comes back."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(70)


def _stop_after(step: int) -> None:
    """In the rank: ask politely, so that the run stops with the checkpoint of this step."""
    take_step = loop.take_step

    def asking(phase, batch, position):
        if position.total_steps + 1 >= step:
            phase.run.stop.asked = True
        return take_step(phase, batch, position)

    loop.take_step = asking
