"""Starts real training launches for the distributed tests, and reads back what they left behind."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from lacuna import state_store
from lacuna.tools import launches
from lacuna.tools.launches import command
from lacuna.trainer.bf16 import check

ROOT = Path(__file__).resolve().parents[2]


def bf16_environment() -> dict[str, str]:
    """Of processes that use bf16 after other things, when the trainer's own check would come too late."""
    needed = check.needed_instruction_set()
    return {check.VARIABLE: needed} if needed else {}


def environment(**extra: str) -> dict[str, str]:
    """Children import the package of this clone and the tests' helpers, wherever they are started."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return launches.environment(**{"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, **extra})


class Launch(launches.Launch):
    """A launch of a config given as a dict; `folder` is its run folder. Several ranks are
    started by start_ranks.py, or by DeepSpeed's launcher."""

    def __init__(self, config: dict, folder: Path, ranks: int, *overrides: str, port: int = 0, cwd: Path | None = None,
                 launcher: bool = False, **variables: str):
        self.folder = folder / config["name"]
        path = folder / f"{config['name']}.yaml"
        path.write_text(yaml.safe_dump({"run_folder": str(folder), **config}))
        words = ("--config", str(path), *overrides)
        self._start(command(ranks, *words, port=port, deepspeed=launcher), config["name"], folder, cwd, variables)

    @classmethod
    def many(cls, jobs: list[dict], name: str, folder: Path, ranks: int, **variables: str) -> Launch:
        """Several runs in one launch (many_runs.py)."""
        launch = cls.__new__(cls)
        launch.folder, path = folder, folder / f"{name}.json"
        for job in jobs:
            job["config"]["run_folder"] = str(folder)
        path.write_text(json.dumps(jobs))
        script = str(Path(__file__).parent / "many_runs.py")
        launch._start(command(ranks, str(path), script=script), name, folder, None, variables)
        return launch

    def _start(self, words: list[str], name: str, folder: Path, cwd: Path | None, variables: dict[str, str]) -> None:
        super().__init__(words, str(folder / f"{name}-{time.monotonic_ns()}.out"), environment(**variables),
                         str(cwd or folder))

    def ok(self, timeout: float = 600) -> None:
        code = self.wait(timeout)
        assert code == 0, f"exit code {code}:\n{self.text()[-5000:]}"

    def wait_for_step(self, step: int, timeout: float = 600) -> None:
        """Until metrics.jsonl has a line of this step (log_every=1)."""
        self.wait_until(lambda: any(line["step"] >= step for line in metrics(self.folder)), f"step {step}", timeout)


def metrics(folder: Path, kind: str | None = None) -> list[dict]:
    return [line for line in launches.read_lines(str(folder / "metrics.jsonl")) if kind in (None, line["kind"])]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder, "train")]


def trace(folder: Path) -> dict[int, set[tuple[int, int]]]:
    return {step: set(samples) for step, samples in launches.read_trace(str(folder)).items()}


def last_checkpoint(folder: Path) -> Path:
    return sorted(p for p in (folder / "checkpoints").iterdir() if (p / "COMMIT.json").exists())[-1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(last_checkpoint(folder) / "model.safetensors")


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Every field of the last checkpoint's snapshot, whole."""
    store = state_store.open(str(folder / "state"))
    reader = store.reader(last_checkpoint(folder).name)
    return {name: np.concatenate([reader.read_shard(name, s) for s in range(store.schema.shards)])
            for name in store.schema.fields}


def optimizer_tensors(folder: Path, step: int | None = None) -> list[torch.Tensor]:
    """Every tensor of the optimizer state, in a fixed order; of the last checkpoint, or of the one at a step."""
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

    checkpoint = last_checkpoint(folder) if step is None else folder / "checkpoints" / f"step-{step:08d}"
    for path in sorted((checkpoint / "engine").glob("*.pt")):
        body = torch.load(path, map_location="cpu", weights_only=False)  # written by this test's own launch
        collect(body.get("optimizer", body.get("optimizer_state_dict")))
    assert found, "no optimizer state in the checkpoint"
    return found


def assert_equal_weights(a: Path, b: Path) -> None:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different, f"different weights: {different[:5]}"
