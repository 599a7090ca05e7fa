"""Proves that how a real process died is put into words, however its exit code reaches us."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from lacuna.basics.deaths import death_signal, describe_exit


@pytest.mark.parametrize(("number", "words"), [
    (signal.SIGILL, "illegal instruction"), (signal.SIGBUS, "/dev/shm"), (signal.SIGKILL, "memory ran out"),
    (signal.SIGSEGV, "segmentation fault"), (signal.SIGABRT, "a library gave up"), (signal.SIGSYS, "sandbox")])
def test_a_process_that_died_by_a_signal(number, words):
    die = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {int(number)})"
    child = [sys.executable, "-c", die]
    seen = subprocess.run(child).returncode
    by_shell = subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", *child], stderr=subprocess.DEVNULL).returncode
    by_launcher = subprocess.run([sys.executable, "-c", f"import sys; sys.exit({seen})"]).returncode
    assert (seen, by_shell, by_launcher) == (-number, 128 + number, 256 - number)
    for code in (seen, by_shell, by_launcher):
        assert describe_exit(code).startswith(f"died by {number.name} (signal {int(number)}, ")
        assert words in describe_exit(code)


def test_a_process_that_ended_by_itself():
    for code in (0, 1, 2, 75, 128, 255):
        assert death_signal(code) is None
        assert describe_exit(code) == f"ended with exit code {code}"


def test_a_signal_without_a_meaning_of_ours_still_has_its_name():
    assert describe_exit(-signal.SIGUSR1) == f"died by SIGUSR1 (signal {int(signal.SIGUSR1)})"
