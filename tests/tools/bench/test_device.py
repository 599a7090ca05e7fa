"""Proves that `lacuna bench device` keeps a virtual accelerator's time, that the real loop runs on it, and that one
read-back per step makes it stand still."""

from __future__ import annotations

import pytest

from lacuna.tools.bench.device.gpu import covered
from lacuna.tools.bench.device.queues import MOST_AHEAD, Queues, Stream
from tests.helpers.benches import bench


class Clock:
    """A host that does nothing but what the test says."""

    def __init__(self) -> None:
        self.time = 100.0
        self.queues = Queues(lambda: self.time, self.work)

    def work(self, seconds: float) -> None:
        self.time += seconds


def utilisation(host: float, waits: bool) -> float:
    clock = Clock()
    for _ in range(50):
        clock.work(host / 2)
        clock.queues.compute(0.010)
        if waits:
            clock.queues.synchronise()
        clock.work(host / 2)
        clock.queues.compute(0.030)
        clock.queues.end_step()
    spent = clock.queues.ends[-1] - clock.queues.ends[9]
    assert spent.synchronisations == 40 * waits
    assert spent.idle_after_them == pytest.approx(spent.time - 40 * 0.040 if waits else 0, abs=1e-9)
    return 40 * 0.040 / spent.time


def test_a_wait_in_every_step_lowers_the_utilisation():
    """The host's work after a wait is what the device misses: half of 8 ms here, as the rest is done meanwhile."""
    assert utilisation(0.008, waits=False) == pytest.approx(1)
    assert utilisation(0.008, waits=True) == pytest.approx(40 / 44)
    assert utilisation(0.050, waits=False) == pytest.approx(40 / 50)  # a host that is too slow


def test_copies_run_beside_the_compute_queue():
    clock, side = Clock(), Stream()
    queues = clock.queues
    queues.compute(0.040)
    queues.current = side
    queues.copy(int(12e9 * 0.010))
    assert side.ready == pytest.approx(100.010)
    side.wait_stream(queues.main)
    queues.copy(int(12e9 * 0.010))
    assert side.ready == pytest.approx(100.050)
    queues.current = queues.main
    queues.copy(int(12e9 * 0.010))  # in the compute queue's own order, after the copy before it
    assert queues.main.ready == pytest.approx(100.060)
    queues.synchronise()
    assert clock.time == pytest.approx(100.060)


def test_the_host_runs_ahead_by_a_bounded_time():
    clock = Clock()
    for _ in range(100):
        clock.queues.compute(0.040)
    assert clock.time == pytest.approx(100 + 100 * 0.040 - MOST_AHEAD)


def test_overlapping_kernels_count_once():
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


@pytest.fixture(scope="module")
def reports() -> dict[bool, dict]:
    return {item: bench("device", "--virtual", "--steps", "10", "--methods", *methods)[0]
            for item, methods in ((False, ("an", "role", "en_scl")), (True, ("an", "--item")))}


def test_the_loop_runs_on_it(reports):
    report = reports[False]
    assert set(report["ratios"]) == {"an", "role", "en_scl"}
    assert report["device"] == "virtual"
    for name, ratio in report["ratios"].items():
        assert 0 < ratio <= 1
        assert report["samples_per_second"][name] == pytest.approx(ratio * 64 / 0.040, rel=1e-3)
        assert 0 < report["main_thread_ms"][name] <= report["process_ms"][name]


def test_a_read_back_per_step_is_felt(reports):
    """A log line every ten steps reads its means back; `--item` adds one wait to every step."""
    before, after = (report["synchronisations"]["an"] for report in (reports[False], reports[True]))
    assert before <= 0.2
    assert after == pytest.approx(before + 1)
    idle = reports[True]["idle_after_them"]["an"]
    assert idle > reports[False]["idle_after_them"]["an"]
    assert reports[True]["ratios"]["an"] <= 1 - idle + 1e-3
