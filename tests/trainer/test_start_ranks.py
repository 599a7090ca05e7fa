"""Ranks of one machine know their places, end together, and hear whoever signals their starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lacuna.basics.places import START_SCRIPT

_HEAD = """
import os, signal, sys, time
rank, words = os.environ["RANK"], sys.argv[1:]

def say(*what):
    sys.stdout.write(" ".join([rank, *what]) + "\\n")
    sys.stdout.flush()

"""
_HEARS = """
def heard(number, frame):
    say("heard", signal.Signals(number).name)
    sys.exit(0)

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, heard)
say("ready")
time.sleep(600)
"""


class Started:
    def __init__(self, folder: Path, body: str, *arguments: str):
        self.script, self.output = folder / "script.py", folder / "out.txt"
        self.script.write_text(_HEAD + body)
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen([sys.executable, START_SCRIPT, "2", "29999", str(self.script), *arguments],
                                            stdout=out, stderr=subprocess.STDOUT)

    def lines(self) -> set[str]:
        return set(self.output.read_text().splitlines())

    def wait_for(self, *lines: str) -> None:
        end = time.monotonic() + 120
        while not set(lines) <= self.lines():
            assert time.monotonic() < end, self.output.read_text()
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.02)


def test_every_rank_knows_its_place(tmp_path):
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launch = Started(tmp_path, f"say(*[os.environ[name] for name in {names}], *words)", "--config", "a b")
    assert launch.process.wait(120) == 0
    assert launch.lines() == {f"{rank} {rank} 2 2 127.0.0.1 29999 --local_rank={rank} --config a b" for rank in (0, 1)}


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9)])
def test_a_rank_that_fails_ends_the_launch_with_its_code(tmp_path, end, code):
    launch = Started(tmp_path, f"say(str(os.getpid()))\nif rank == '1':\n    {end}\ntime.sleep(600)")
    assert launch.process.wait(120) == code
    pids = {line.split()[0]: int(line.split()[1]) for line in launch.lines()}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_signals_the_starter_means_all_ranks(tmp_path, number):
    """Also a Ctrl-C that only the starter hears: ranks are asked to end as a scheduler would ask them."""
    launch = Started(tmp_path, _HEARS)
    launch.wait_for("0 ready", "1 ready")
    launch.process.send_signal(number)
    assert launch.process.wait(120) == 0, launch.output.read_text()
    assert {"0 heard SIGTERM", "1 heard SIGTERM"} <= launch.lines()


def test_a_rank_that_ends_early_is_not_a_failure(tmp_path):
    launch = Started(tmp_path, "time.sleep(float(rank))\nsay('done')")
    assert launch.process.wait(120) == 0
    assert launch.lines() == {"0 done", "1 done"}
