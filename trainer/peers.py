"""Names a rank of this machine that is killed by a signal: launchers print a bare code, or nothing at all.

Nor does a rank outlive its peers: the next collective fails, or, if it comes to none for long (it builds its model), it
leaves by itself.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lacuna.basics.deaths import describe_exit

if TYPE_CHECKING:
    from lacuna.trainer.world import World

_news = threading.Event()  # a death was looked at
_spoken = threading.Event()  # and it was no sudden one: that rank has said why it left
_watching = threading.Event()
_GRACE_SECONDS = 4.0  # a rank that has come to its end, or fails in a collective, does so meanwhile


class Peers(threading.Thread):
    """Made by all ranks together. Of several survivors on a machine, the first one speaks."""

    def __init__(self, world: World, leave: Callable[[str], None]):
        """`leave` is told when a peer has been gone for a while and this rank has not noticed."""
        super().__init__(name="peers", daemon=True)
        mine = (machine(), os.getpid())
        self.rank, self.ended, self.leave = world.rank, set[int](), leave
        self.pids = {rank: pid for rank, (machine, pid) in enumerate(world.gather(mine))
                     if rank != world.rank and machine == mine[0]}
        self.handles: dict[int, int] = {}  # file descriptor of a process → its rank
        for rank, pid in self.pids.items():
            try:
                self.handles[os.pidfd_open(pid)] = rank
            except ProcessLookupError:  # ended already
                self.ended.add(rank)
            except OSError:  # a sandbox without this call
                continue
        self.leaving: threading.Timer | None = None
        if self.ended:
            self._leave_soon(min(self.ended))
        self.wake, self.woken = os.pipe()
        if self.handles:
            _watching.set()
            self.start()

    def run(self) -> None:
        poller = select.poll()
        for handle in (self.wake, *self.handles):
            poller.register(handle, select.POLLIN)
        while self.handles:
            for handle, _ in poller.poll():
                if handle == self.wake:
                    return
                poller.unregister(handle)
                self._look(self.handles.pop(handle))
                os.close(handle)

    def _look(self, rank: int) -> None:
        """At the moment of its end a process can still be asked how it ended; its parent has not done so yet."""
        code = _exit_code(self.pids[rank])
        self.ended.add(rank)
        if code is not None and code < 0 and not any(other < self.rank for other in set(self.pids) - self.ended):
            print(f"lacuna: rank {rank} (process {self.pids[rank]}) {describe_exit(code)}. Start again to resume.",
                  file=sys.stderr, flush=True)
        if code is not None and code > 0:
            _spoken.set()
        _news.set()
        self._leave_soon(rank)

    def _leave_soon(self, rank: int) -> None:
        if self.leaving is None:
            self.leaving = threading.Timer(_GRACE_SECONDS, self._leave, [rank])
            self.leaving.daemon = True
            self.leaving.start()

    def _leave(self, rank: int) -> None:
        self.leave(f"rank {rank} (process {self.pids[rank]}) is gone, so rank {self.rank} ends, too. Start again to "
                   "resume.")

    def stop(self) -> None:
        if self.leaving is not None:
            self.leaving.cancel()
        os.close(self.woken)  # the other end becomes readable
        if self.ident is not None:
            self.join(timeout=5)
        for handle in (self.wake, *self.handles):
            os.close(handle)


def wait_for_news(seconds: float) -> bool:
    """A lost connection comes a moment before the death that it comes from can be seen: before leaving, wait for it.

    True if a peer left by itself and has said why.
    """
    if _watching.is_set():
        _news.wait(seconds)
    return _spoken.is_set()


def _exit_code(pid: int) -> int | None:
    """Of a process that has ended: negative for a signal; None if its parent has already taken note of it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()  # after the name, which may hold anything: fields 3 to 52
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] in (b"Z", b"X") else None


def machine() -> tuple[str, str]:
    """Where process numbers mean the same: the boot and the namespace of processes."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f.read().strip(), os.readlink("/proc/self/ns/pid")
