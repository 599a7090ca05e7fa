"""Proves that a SIGKILL at any point leaves the last committed snapshot bit-exact and the next launch clean."""

from __future__ import annotations

import random
import signal
import time

import pytest

from lacuna.state_store.faults import POINTS
from tests.helpers.state.crashes import finish_cleanly, kill_at, last_committed, launch


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_every_named_point(point, tmp_path):
    """Killed at the first and a later arrival at the point, in turn, then resumed to the end."""
    url = str(tmp_path / "state")
    counts = (1, 2) if point.startswith(("create", "launch", "orphans")) else (1, 7) if "chunk" in point else (1, 3)
    killed = 0
    for count in counts:
        if point.startswith("orphans"):  # something to remove: a launch that died while writing
            kill_at(url, "chunk.written:9")
            count = 1
        killed += kill_at(url, f"{point}:{count}")
    expected = {"create.before_group": 1, "launch.before_entry": 1, "launch.entry": 1}.get(point, 2)
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
