"""Proves that a SIGKILL at any point leaves the last committed snapshot bit-exact and the next launch clean."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.state_store.faults import POINTS
from tests.helpers.state_crash_worker import SEED, apply
from tests.helpers.state_samples import INITIALS, copied, initial_state

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "helpers" / "state_crash_worker.py"


class Model:
    """The dict model after every step, computed as needed."""

    def __init__(self):
        self.now, self.after = initial_state(SEED), {}

    def __call__(self, step: int) -> dict:
        while step not in self.after:
            apply(self.now, len(self.after))
            self.after[len(self.after)] = copied(self.now)
        return self.after[step]


MODEL = Model()


def launch(url: str, steps: int, fault: str = "") -> subprocess.Popen:
    environment = {**os.environ, "LACUNA_FAULT": fault, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen([sys.executable, str(WORKER), url, str(steps)], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def last_committed(url: str) -> int:
    """Check every listed snapshot against the model, bit for bit; returns the newest step, -1 without one."""
    try:
        store = state_store.open(url)
    except UserError:
        assert not storage.exists(storage.join(url, "zarr.json"))
        return -1
    snapshots = store.snapshots()
    for entry in snapshots:
        reader, expected = store.reader(entry.name, INITIALS), MODEL(entry.meta["step"])
        for field, shards in expected.items():
            for shard, rows in enumerate(shards):
                np.testing.assert_array_equal(reader.read_shard(field, shard), rows)
    return snapshots[-1].meta["step"] if snapshots else -1


def finish_cleanly(url: str, before: int) -> None:
    """The next launch needs no cleaning by hand, goes on from the last commit, and leaves no orphan."""
    process = launch(url, 2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert last_committed(url) == before + 2, out
    assert state_store.open(url).orphans() == []


def kill_at(url: str, fault: str, steps: int = 4) -> bool:
    """Run until the fault point kills the process; False if the run did not reach it."""
    before = last_committed(url)
    process = launch(url, steps, fault)
    out, err = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), err
    reported = [int(line) for line in out.split()]
    after = last_committed(url)
    assert after >= max([before, *reported]), f"{fault}: a committed snapshot is gone"
    return process.returncode != 0


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_every_named_point(point, tmp_path):
    """Killed at the first and a later arrival at the point, in turn, then resumed to the end."""
    url = str(tmp_path / "state")
    counts = (1, 2) if point.startswith(("create", "attempt", "sweep")) else (1, 7) if "chunk" in point else (1, 3)
    killed = 0
    for count in counts:
        if point.startswith("sweep"):  # something to sweep: a launch that died while writing
            kill_at(url, "chunk.written:9")
            count = 1
        killed += kill_at(url, f"{point}:{count}")
    expected = {"create.before_group": 1, "attempt.before_entry": 1, "attempt.entry": 1}.get(point, 2)
    assert killed == expected, f"{point} killed {killed} of {len(counts)} launches"
    finish_cleanly(url, last_committed(url))


def random_kills(url: str, count: int, rng: random.Random) -> int:
    killed = 0
    for _ in range(count):
        before = last_committed(url)
        process = launch(url, 10_000)
        process.stdout.readline()  # type: ignore[union-attr]  # imports are over, steps are running
        time.sleep(rng.random() * 0.15)
        process.kill()
        out, _ = process.communicate()
        after = last_committed(url)
        assert after >= max([before, *[int(line) for line in out.split()]])
        killed += process.returncode == -signal.SIGKILL
    return killed


def test_kill_at_random_times(tmp_path):
    """Six kills at random moments of one store's life."""
    url = str(tmp_path / "state")
    assert random_kills(url, 6, random.Random(0)) == 6
    finish_cleanly(url, last_committed(url))


@pytest.mark.long
def test_two_hundred_kills(tmp_path):
    """Named points at many arrivals and 110 random moments, all on one store that lives through them."""
    url, rng = str(tmp_path / "state"), random.Random(1)
    faults = []
    for point in POINTS:
        if point.startswith("chunk"):
            faults += [f"{point}:{count}" for count in rng.sample(range(1, 60), 12)]
        elif point.startswith(("attempt", "sweep")):
            faults += [f"{point}:1"] * 4
        elif not point.startswith("create"):
            faults += [f"{point}:{count}" for count in (1, 2, 3, 4)] * 2
    rng.shuffle(faults)
    killed = sum(kill_at(url, fault) for fault in faults) + random_kills(url, 110, rng)
    assert killed >= 200
    finish_cleanly(url, last_committed(url))
