"""What two ranks cost: throughput of one 2-rank job ÷ that of two independent 1-rank jobs at the same time.

Both use the same cores, model, images and batch per rank, so the ratio shows what working together costs (gradient
exchange, agreeing on every step, waiting for the slower rank). EN + SCL on small images, ResNet-18, real launches.
Ratio two_ranks: samples a second of the pair ÷ samples a second of the two single ones together.
`where` says how the time of a step is spent: waiting for data, waiting for state, and the rest in both cases.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import tempfile

import yaml

from tools.bench.tax import make_data
from tools.launches import Launch, command, environment, read_lines

_BATCH, _CLASSES, _LOG_EVERY = 16, 80, 5


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="measured (default 120, quick: 30)")
    parser.add_argument("--backbone", default="torchvision:resnet18", help="(default torchvision:resnet18)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    steps = args.steps or (30 if quick else 120)
    with tempfile.TemporaryDirectory(prefix="lacuna-scale-") as folder:
        make_data(folder, _CLASSES, 2048, 64)
        alone = _measure(folder, ["one", "other"], 1, steps, args.backbone)
        together = _measure(folder, ["both"], 2, steps, args.backbone)
    single = sum(facts["samples_per_second"] for facts in alone)
    return {"ratios": {"two_ranks": round(together[0]["samples_per_second"] / single, 3)},
            "where": {"one_rank_twice": alone, "two_ranks": together[0]}, "batch_per_rank": _BATCH}


def _measure(folder: str, names: list[str], ranks: int, steps: int, backbone: str) -> list[dict]:
    """Jobs that run at the same time, until all have taken their steps."""
    launches = []
    for name in names:
        config = os.path.join(folder, name + ".yaml")
        with open(config, "w", encoding="utf-8") as f:
            yaml.safe_dump(_config(folder, name, ranks, backbone), f)
        launches.append(Launch(command(ranks, "--config", config), os.path.join(folder, name + ".out"),
                               environment(), folder))

    def lines(name: str) -> list[dict]:
        found = read_lines(os.path.join(folder, name, "metrics.jsonl"))
        return [line for line in found if line["kind"] == "train"]

    warm = 2 * _LOG_EVERY
    try:
        for launch, name in zip(launches, names, strict=True):
            launch.wait_until(lambda name=name: bool(lines(name)) and lines(name)[-1]["step"] >= warm + steps,  # type: ignore[misc]
                              f"step {warm + steps} of {name}")
        # Only while all of them run is the machine shared as in the comparison.
        shared = min(lines(name)[-1]["step"] for name in names)
    finally:
        for launch in launches:
            launch.signal_all(signal.SIGKILL)
            launch.wait()
    return [_facts([line for line in lines(name) if warm < line["step"] <= shared], ranks) for name in names]


def _facts(lines: list[dict], ranks: int) -> dict:
    rate = statistics.median(line["samples_per_second"] for line in lines)
    step = _BATCH * ranks / rate
    data = statistics.median(line["data_wait_seconds"] for line in lines) / _LOG_EVERY
    stalls = [b["state_stall_seconds"] - a["state_stall_seconds"] for a, b in itertools.pairwise(lines)]
    state = statistics.median(stalls or [0.0]) / _LOG_EVERY
    return {"samples_per_second": round(rate, 2), "step_ms": round(step * 1e3, 1), "data_wait_ms": round(data * 1e3, 2),
            "state_wait_ms": round(state * 1e3, 2), "compute_and_exchange_ms": round((step - data - state) * 1e3, 1)}


def _config(folder: str, name: str, ranks: int, backbone: str) -> dict:
    return {
        "name": name, "run_folder": folder,
        "data": {"train": {"url": folder + "/data"}, "image_size": 64, "streams": ranks, "open_shards": 2, "workers": 1,
                 "augment": {"crop": "random_resized"}},
        "model": {"backbone": backbone}, "method": {"name": "en_scl", "expected_positives": 1.2},
        "phases": [{"name": "all", "epochs": 1000, "batch": _BATCH * ranks, "lr": 1e-4}],
        "train": {"log_every": _LOG_EVERY, "checkpoint_every": "1000ep"},
    }
