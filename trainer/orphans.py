"""A rank does not outlive its launcher: it looks for itself whether that is still there, and stops with a checkpoint.

Ranks are started by start_ranks.py, or by a node agent (`deepspeed.launcher.launch`), and that by DeepSpeed's runner. A
signal to the runner alone reaches neither.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_INTERVAL_SECONDS = 1.0
_AGENT, _RUNNER = b"deepspeed.launcher.launch", b"deepspeed"


class LauncherWatch(threading.Thread):
    """Started first thing in a rank, so that it knows who its launchers were. A run without launcher has none."""

    def __init__(self) -> None:
        super().__init__(name="launcher-watch", daemon=True)
        self.launchers = _launchers() if "LOCAL_RANK" in os.environ else []  # (child, parent)
        self.stopped = threading.Event()
        if self.launchers:
            self.start()

    def run(self) -> None:
        while not self.stopped.wait(_INTERVAL_SECONDS):
            gone = [parent for child, parent in self.launchers if _parent(child) != parent]
            if gone:
                print(f"lacuna: the launcher of rank {os.environ.get('RANK', '0')} (process {gone[0]}) is gone: "
                      "stopping with a checkpoint", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)  # before training begins, this ends the process
                return

    def stop(self) -> None:
        self.stopped.set()


def _launchers() -> list[tuple[int, int]]:
    """This rank and its agent; the agent and DeepSpeed's runner, if it was that which started it."""
    agent = os.getppid()
    found, runner = [(os.getpid(), agent)], _parent(agent)
    if _AGENT in _command(agent) and runner is not None and _RUNNER in _command(runner):
        found.append((agent, runner))
    return found


def _parent(pid: int) -> int | None:
    """None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[1])  # after the name, which may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read()
    except OSError:
        return b""
