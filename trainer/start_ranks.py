"""Starts the ranks of a launch on this machine, each a process of its own, and waits for them.

  python start_ranks.py RANKS PORT SCRIPT [ARGUMENT …]
DeepSpeed's launcher does the same by two further interpreters, which import torch one after the other before the first
rank begins to. It stays in charge of several nodes.

When a rank fails, the others are asked to end, and ended if they do not. Who signals this process means all ranks.
Only the standard library is imported here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 30.0  # from being asked to end until being ended: a checkpoint may have to be written
_OWN_SECONDS = 1.0  # in which a Ctrl-C of the terminal has reached the ranks themselves


class Ranks:
    def __init__(self, count: int, port: str, script: str, arguments: list[str]):
        self.ask_at = float("inf")  # when the ranks are asked to end
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)
        group = {"WORLD_SIZE": str(count), "LOCAL_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.children = [subprocess.Popen([sys.executable, "-u", script, f"--local_rank={rank}", *arguments],
                                          env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                         for rank in range(count)]

    def _told(self, number, frame) -> None:
        # In a terminal ranks hear a Ctrl-C themselves; a SIGINT that came second would end them without a checkpoint.
        self.ask_at = min(self.ask_at, time.monotonic() + (_OWN_SECONDS if number == signal.SIGINT else 0))

    def wait(self) -> int:
        """The exit code of the launch: 0, or that of a rank that failed."""
        asked = False
        while None in (codes := [child.poll() for child in self.children]) and not any(codes):
            if not asked and time.monotonic() >= self.ask_at:
                asked = True
                self._send(signal.SIGTERM)
            time.sleep(_LOOK_SECONDS)
        if None in codes:
            self._end()
        code = next((code for code in codes if code), 0)
        return 128 - code if code < 0 else code  # of a signal, what a shell makes of it

    def _end(self) -> None:
        self._send(signal.SIGTERM)
        end = time.monotonic() + _GRACE_SECONDS
        while any(child.poll() is None for child in self.children) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        self._send(signal.SIGKILL)
        for child in self.children:
            child.wait()

    def _send(self, number: int) -> None:
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)


if __name__ == "__main__":
    sys.exit(Ranks(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]).wait())
