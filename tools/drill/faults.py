"""The faults of `lacuna drill`: each is done to a running launch, and each says how and when it was noticed.

A fault is a function (bench, launch) → (seconds until it was noticed, the launch that goes on after it).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lacuna import state_store
from lacuna.state_store.chunks import chunk_url
from lacuna.tools.launches import Launch, LaunchError

if TYPE_CHECKING:
    from lacuna.tools.drill import Bench

Noticed = tuple[float, Launch]


def kill(bench: Bench, launch: Launch) -> Noticed:
    """SIGKILL of one rank: its peers name it and the signal, and end with the launcher."""
    ranks = launch.ranks()
    number = bench.random.randrange(len(ranks))
    os.kill(ranks[number], signal.SIGKILL)
    seconds = _ended(launch)
    if len(ranks) > 1 and f"rank {number} (process {ranks[number]}) died by SIGKILL" not in launch.text():
        raise LaunchError("the dead rank was not named", launch)
    return seconds, bench.start()


def freeze(bench: Bench, launch: Launch) -> Noticed:
    """SIGSTOP of one rank: the others name it after train.timeout_seconds and end."""
    ranks = launch.ranks()
    number = bench.random.randrange(len(ranks))
    began = time.monotonic()
    os.kill(ranks[number], signal.SIGSTOP)
    try:
        launch.wait_until(lambda: f"Waiting for: rank {number} " in launch.text(), f"rank {number} was named")
        seconds = time.monotonic() - began
    finally:
        # The launcher ends its ranks politely first, which a frozen process cannot hear.
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[number], signal.SIGCONT)
    _ended(launch)
    return seconds, bench.start()


def full_disk(bench: Bench, launch: Launch) -> Noticed:
    """No file of the run may grow to the size of a checkpoint's largest: the next checkpoint fails and says so."""
    limit = bench.largest_file() // 2
    for pid in launch.ranks():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    seconds = _ended(launch)
    if "could not be written" not in launch.text() and "cannot write" not in launch.text():
        raise LaunchError("the full disk was not named", launch)
    return seconds, bench.start()


def chunk(bench: Bench, launch: Launch) -> Noticed:
    """A byte of a state chunk changes on disk: reading it ends the launch, and the checkpoints with it are given up."""
    _kill_all(launch)
    newest, before = bench.checkpoints()[-1], bench.checkpoints()[-2]
    store = state_store.open(os.path.join(bench.folder, "state"))
    new, old = store.manifest(newest).refs, store.manifest(before).refs
    # A chunk that the checkpoint before it has too would make both useless.
    names = sorted((field, shard) for field in new for shard in new[field]
                   if old.get(field, {}).get(shard) != new[field][shard] and shard in bench.shards_to_come(newest))
    field, shard = bench.random.choice(names)
    path = chunk_url(store.url, field, shard, new[field][shard].token)
    with open(path, "r+b") as f:
        f.seek(new[field][shard].size // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 0xFF]))
    launch = bench.start()
    seconds = _ended(launch)
    if f"field {field!r}, shard {shard}: chunk" not in launch.text():
        raise LaunchError("the damaged chunk was not named", launch)
    return seconds, bench.start()


def checkpoint(bench: Bench, launch: Launch) -> Noticed:
    """A file of the newest checkpoint is deleted: it is mended, or the one before it is used."""
    _kill_all(launch)
    folder = os.path.join(bench.folder, "checkpoints", bench.checkpoints()[-1])
    files = sorted(os.path.join(base, name) for base, _, names in os.walk(folder) for name in names)
    victim = bench.random.choice(files)
    os.remove(victim)
    launch, began = bench.start(), time.monotonic()
    launch.wait_until(lambda: f"{folder} is torn (" in launch.text() or f"mended: {victim}" in launch.text(),
                      f"{victim} was missed")
    return time.monotonic() - began, launch


FAULTS: dict[str, Callable[[Bench, Launch], Noticed]] = {
    "kill": kill, "freeze": freeze, "full_disk": full_disk, "chunk": chunk, "checkpoint": checkpoint,
}


def _ended(launch: Launch) -> float:
    """Seconds until the launch ended by itself; it must not have succeeded."""
    began = time.monotonic()
    if launch.wait() == 0:
        raise LaunchError("the launch went on as if nothing had happened", launch)
    return time.monotonic() - began


def _kill_all(launch: Launch) -> None:
    """As a power cut does."""
    launch.signal_all(signal.SIGKILL)
    launch.wait()
