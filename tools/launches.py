"""Training launches as processes to watch and to signal: used by `lacuna train`, the fault drill, the demo and the
tests."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from lacuna.basics.errors import UserError
from lacuna.basics.places import RUN_SCRIPT, START_SCRIPT

_PORTS = range(20_000, 32_000)  # Linux connects from 32768 upwards
# Of NVIDIA, of AMD, of NVIDIA under Windows
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**extra: str) -> dict[str, str]:
    """Of ranks that share few cores: one thread each (sums then have one order) and no busy waiting.

    A process group that this process is in is not the launch's own.
    """
    own = {name: value for name, value in os.environ.items() if name not in _GROUP}
    return {**own, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **extra}


def command(ranks: int, *arguments: str, port: int = 0, script: str = RUN_SCRIPT,
            hostfile: str | None = None, deepspeed: bool = False, verbose: bool = False) -> list[str]:
    """Of a launch on this machine, where one rank needs no launcher, or on all slots of a hostfile.

    Ranks of this machine are started by start_ranks.py, unless DeepSpeed's launcher is asked for; `verbose`: that tells
    what it does, too.
    """
    if ranks == 1 and not hostfile:
        return [sys.executable, script, *arguments]
    if not (hostfile or deepspeed or verbose):
        return [sys.executable, START_SCRIPT, str(ranks), str(port or free_port()), script, *arguments]
    launcher = os.path.join(os.path.dirname(sys.executable), "deepspeed")
    if shutil.which(launcher) is None:
        raise UserError(f"{launcher}: not found. Install the project with `make install`.")
    words = [launcher, *([] if verbose else ["--log_level", "critical"])]
    if hostfile:
        return [*words, "--hostfile", hostfile, script, *arguments]
    return [*words, "--num_accelerators", str(ranks), "--master_port", str(port or free_port()), script, *arguments]


def gpus() -> int:
    """Of this machine: a rank each, unless told otherwise."""
    if not any(glob.glob(pattern) for pattern in _DEVICE_FILES):
        return 0
    import torch  # costs seconds

    return torch.cuda.device_count()


def free_port() -> int:
    """A port that a launch will listen on once its ranks have started, seconds from now.

    Not from the range that the system takes ports of outgoing connections from: one of those could be there first.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise UserError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free, of 100 that were tried.")


class Launch:
    """One launch in its own session, so that signals reach all of its processes and nothing else."""

    def __init__(self, words: list[str], output: str, variables: dict[str, str], cwd: str):
        self.output, self.alone = output, words[0] == sys.executable and words[1] != START_SCRIPT
        with open(output, "wb") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=variables,
                                            start_new_session=True, cwd=cwd)

    def text(self) -> str:
        with open(self.output, encoding="utf-8", errors="replace") as f:
            return f.read()

    def wait(self, timeout: float = 600) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            raise LaunchError(f"the launch did not end within {timeout:.0f} s", self) from None

    def wait_until(self, true: Callable[[], bool], what: str, timeout: float = 600) -> None:
        """Until something is true of the running launch."""
        end = time.monotonic() + timeout
        while not true():
            if self.process.poll() is not None and not true():
                raise LaunchError(f"the launch ended before {what}", self)
            if time.monotonic() > end:
                self.signal_all(signal.SIGKILL)
                raise LaunchError(f"not within {timeout:.0f} s: {what}", self)
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """Pids of the training processes of this launch, by rank."""
        if self.alone:
            return [self.process.pid]
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                if os.getsid(int(name)) != self.process.pid:
                    continue
                with open(f"/proc/{name}/environ", "rb") as f:
                    variables = f.read().split(b"\0")
                with open(f"/proc/{name}/cmdline", "rb") as f:
                    words = f.read()
            except (OSError, ProcessLookupError):
                continue
            rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
            if b"--local_rank" in words and b"deepspeed.launcher" not in words and rank is not None:
                found[int(rank)] = int(name)
        return [found[r] for r in sorted(found)]

    def signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class LaunchError(AssertionError):
    """A launch did something else than it should have; the end of what it printed is part of the message."""

    def __init__(self, what: str, launch: Launch):
        super().__init__(f"{what}:\n{launch.text()[-5000:]}")


def read_lines(path: str) -> list[dict]:
    """JSON lines of a file that may be growing: a line being written is left out."""
    lines = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as f:
        for line in f:
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def timeless(lines: list[dict]) -> list[dict]:
    """Metrics without what depends on the clock, or on how often a run was launched."""
    clocked = ("samples_per_second", "data_wait_seconds", "launch")
    return [{k: v for k, v in line.items() if k not in clocked and not k.startswith("state_")} for line in lines]


def read_trace(folder: str) -> dict[int, list[tuple[int, int]]]:
    """step → samples (shard, row) of the global batch; of a step's lines, those of the newest launch count."""
    steps: dict[int, tuple[int, list]] = {}
    root = os.path.join(folder, "trace")
    for name in sorted(name for name in os.listdir(root) if name.endswith(".jsonl")):
        for line in read_lines(os.path.join(root, name)):
            launch, samples = steps.get(line["step"], (0, []))
            if line["launch"] >= launch:
                kept = samples if line["launch"] == launch else []
                steps[line["step"]] = (line["launch"], kept + [tuple(sample) for sample in line["samples"]])
    return {step: samples for step, (_, samples) in steps.items()}
