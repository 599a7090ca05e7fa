"""Starts real training launches for the distributed tests, and reads back what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")


def environment(**extra: str) -> dict[str, str]:
    """One thread a rank: sums then have one order, so equality can be bit for bit."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "", **extra}


class Launch:
    """One launch in its own session, so that signals reach all of its processes and nothing else."""

    def __init__(self, config: dict, folder: Path, ranks: int, *overrides: str, port: int = 0, cwd: Path | None = None):
        self.folder = folder / config["name"]
        path = folder / f"{config['name']}.yaml"
        path.write_text(yaml.safe_dump({**config, "run_folder": str(folder)}))
        self._start([str(ROOT / "trainer" / "run.py"), "--config", str(path), *overrides], config["name"], folder,
                    ranks, port, cwd)

    @classmethod
    def many(cls, jobs: list[dict], name: str, folder: Path, ranks: int) -> Launch:
        """Several runs in one launch (many_runs.py)."""
        launch = cls.__new__(cls)
        launch.folder, path = folder, folder / f"{name}.json"
        for job in jobs:
            job["config"]["run_folder"] = str(folder)
        path.write_text(json.dumps(jobs))
        launch._start([str(Path(__file__).parent / "many_runs.py"), str(path)], name, folder, ranks, 0, None)
        return launch

    def _start(self, script: list[str], name: str, folder: Path, ranks: int, port: int, cwd: Path | None) -> None:
        if ranks == 1:
            command = [sys.executable, *script]
        else:
            command = [DEEPSPEED, "--num_accelerators", str(ranks), "--master_port", str(port or free_port()), *script]
        self.output = folder / f"{name}-{time.monotonic_ns()}.out"
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(),
                                            start_new_session=True, cwd=cwd or folder)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, timeout: float = 180) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            raise AssertionError(f"launch did not end within {timeout} s:\n{self.text()[-3000:]}") from None

    def ok(self, timeout: float = 180) -> None:
        code = self.wait(timeout)
        assert code == 0, f"exit code {code}:\n{self.text()[-5000:]}"

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        """Until metrics.jsonl has a line of this step (log_every=1)."""
        path, end = self.folder / "metrics.jsonl", time.monotonic() + timeout
        while time.monotonic() < end:
            if path.exists() and any(line["step"] >= step for line in metrics(self.folder)):
                return
            assert self.process.poll() is None, f"ended before step {step}:\n{self.text()[-5000:]}"
            time.sleep(0.02)
        raise AssertionError(f"step {step} not reached in {timeout} s:\n{self.text()[-3000:]}")

    def ranks(self) -> list[int]:
        """Pids of the training processes of this launch, by rank."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if os.getsid(int(entry.name)) != self.process.pid:
                    continue
                variables = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except (OSError, ProcessLookupError):
                continue
            rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
            if b"run.py" in command and b"deepspeed.launcher" not in command and rank is not None:
                found[int(rank)] = int(entry.name)
        return [found[r] for r in sorted(found)]

    def signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def metrics(folder: Path, kind: str | None = None) -> list[dict]:
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a line being written
    return [line for line in lines if kind in (None, line["kind"])]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder, "train")]


def timeless(lines: list[dict]) -> list[dict]:
    """Metrics without what depends on the clock."""
    clocked = ("samples_per_second", "data_wait_seconds")
    return [{k: v for k, v in line.items() if k not in clocked and not k.startswith("state_")} for line in lines]


def trace(folder: Path) -> dict[int, set[tuple[int, int]]]:
    """step → samples of the global batch; after a resume, the last line of a step counts."""
    steps: dict[int, dict[str, list]] = {}
    for path in sorted((folder / "trace").glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], {})[path.name] = line["samples"]
    return {step: {tuple(s) for samples in ranks.values() for s in samples} for step, ranks in steps.items()}


def last_checkpoint(folder: Path) -> Path:
    return sorted(p for p in (folder / "checkpoints").iterdir() if (p / "COMMIT.json").exists())[-1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(last_checkpoint(folder) / "model.safetensors")


def optimizer_tensors(folder: Path) -> list[torch.Tensor]:
    """Every tensor of the optimizer state, in a fixed order."""
    found: list[torch.Tensor] = []

    def collect(node) -> None:
        if isinstance(node, torch.Tensor):
            found.append(node)
        elif isinstance(node, dict):
            for key in sorted(node, key=str):
                collect(node[key])
        elif isinstance(node, list | tuple):
            for item in node:
                collect(item)

    for path in sorted((last_checkpoint(folder) / "engine").glob("*.pt")):
        body = torch.load(path, map_location="cpu", weights_only=False)  # written by this test's own launch
        collect(body.get("optimizer", body.get("optimizer_state_dict")))
    assert found, "no optimizer state in the checkpoint"
    return found


def assert_equal_weights(a: Path, b: Path) -> None:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different, f"different weights: {different[:5]}"
