"""Launches the process that crash tests kill, and checks every snapshot it left against the dict model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.state_store.schema import is_store
from tests.helpers.state.crash_worker import SEED, apply
from tests.helpers.state.samples import INITIALS, copied, initial_state

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("crash_worker.py")


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
        assert not is_store(url)
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
