"""What two ranks cost: throughput of one 2-rank job ÷ that of two independent 1-rank jobs at the same time.

Both use the same cores, model, images and batch per rank, so the ratio shows what working together costs (gradient
exchange, agreeing on every step, waiting for the slower rank). EN + SCL on small images, ResNet-18, real launches.
An exchange costs the same for any batch (45 MB of gradients through gloo), so --batch decides how much it weighs.
The two sides take turns of a few steps while the other is held, so that other load hits both alike.
Ratio two_ranks: samples a second of the pair ÷ samples a second of the two single ones together.
`where` says how the time of a step is spent: waiting for data, waiting for state, and the rest in both cases;
`ceiling` shows what the cores allow without any exchange: the two single jobs together ÷ one of them alone; where it is
below 2, memory bandwidth and shared caches are the limit, which two ranks meet as well.
`first_losses` of the warm-up steps show that the two single jobs do the same work.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import tempfile

import yaml

from lacuna.basics.errors import UserError
from lacuna.tools.bench.tax import make_data
from lacuna.tools.launches import Launch, command, environment, read_lines

_CLASSES, _WARM_UP, _STEPS_A_TURN = 80, 3, 5


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, help="of each side (default 8, quick: 2)")
    parser.add_argument("--batch", type=int, help="images a rank and step (default 64, quick: 32)")
    parser.add_argument("--images", type=int, default=2048, help="of the dataset (default 2048)")
    parser.add_argument("--backbone", default="torchvision:resnet18", help="(default torchvision:resnet18)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    turns, batch = args.turns or (2 if quick else 8), args.batch or (32 if quick else 64)
    if min(turns, batch) < 1 or args.images < 64:
        raise UserError(f"--turns {turns}, --batch {batch}, --images {args.images}: give at least 1, 1 and 64.")
    with tempfile.TemporaryDirectory(prefix="lacuna-scale-") as folder:
        make_data(folder, _CLASSES, args.images, min(64, args.images // 4))
        jobs = {name: Job(folder, name, ranks, batch, args.backbone)
                for name, ranks in (("one", 1), ("other", 1), ("both", 2))}
        try:
            _take_turns({"independent": [jobs["one"], jobs["other"]], "ranks": [jobs["both"]], "alone": [jobs["one"]]},
                        turns)
        finally:
            for job in jobs.values():
                job.launch.signal_all(signal.SIGKILL)
                job.launch.wait()
        twice, together = [jobs[name].facts("independent") for name in ("one", "other")], jobs["both"].facts("ranks")
        alone = jobs["one"].facts("alone")
    longer = together["step_ms"] - statistics.mean(single["step_ms"] for single in twice)
    independent = sum(single["samples_per_second"] for single in twice)
    return {"ratios": {"two_ranks": round(together["samples_per_second"] / independent, 3)}, "batch_per_rank": batch,
            "ceiling": {"two_independent_vs_one_alone": round(independent / alone["samples_per_second"], 3),
                        "two_ranks_vs_one_alone": round(together["samples_per_second"] / alone["samples_per_second"],
                                                        3)},
            "where": {"one_rank_twice": twice, "one_rank_alone": alone, "two_ranks": together,
                      "exchange_and_waiting_ms": round(longer, 1)}}


class Job:
    """A training that can be held."""

    def __init__(self, folder: str, name: str, ranks: int, batch: int, backbone: str):
        self.name, self.batch = name, batch * ranks
        self.metrics = os.path.join(folder, name, "metrics.jsonl")
        self.measured: dict[str, list[list[dict]]] = {}  # by side and turn
        config = os.path.join(folder, name + ".yaml")
        with open(config, "w", encoding="utf-8") as f:
            yaml.safe_dump(_config(folder, name, ranks, batch, backbone), f)
        self.launch = Launch(command(ranks, "--config", config), os.path.join(folder, name + ".out"), environment(),
                             folder)

    def lines(self) -> list[dict]:
        return [line for line in read_lines(self.metrics) if line["kind"] == "train"]

    def reached(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def wait_for(self, step: int) -> None:
        self.launch.wait_until(lambda: self.reached() >= step, f"step {step} of {self.name}")

    def facts(self, side: str) -> dict:
        """Medians over the steps of all turns of a side."""
        lines = [line for turn in self.measured[side] for line in turn]
        rate = statistics.median(line["samples_per_second"] for line in lines)
        data = statistics.median(line["data_wait_seconds"] for line in lines)
        state = statistics.median(b["state_stall_seconds"] - a["state_stall_seconds"]
                                  for turn in self.measured[side] for a, b in itertools.pairwise(turn))
        step = self.batch / rate
        return {"samples_per_second": round(rate, 2), "step_ms": round(step * 1e3, 1),
                "data_wait_ms": round(data * 1e3, 2), "state_wait_ms": round(state * 1e3, 2),
                "compute_and_exchange_ms": round((step - data - state) * 1e3, 1), "steps": len(lines),
                "first_losses": [line["loss"] for line in self.lines()[:_WARM_UP]]}


def _take_turns(sides: dict[str, list[Job]], turns: int) -> None:
    """One side runs while the others are held, a few steps each: the machine's own ups and downs hit all alike."""
    for job in dict.fromkeys(itertools.chain(*sides.values())):
        job.wait_for(_WARM_UP)
        job.launch.signal_all(signal.SIGSTOP)
    for _ in range(turns):
        for name, side in sides.items():
            for job in side:
                job.launch.signal_all(signal.SIGCONT)
            first = {job.name: job.reached() + 1 for job in side}  # that one began before
            for job in side:
                job.wait_for(first[job.name] + _STEPS_A_TURN)
            for job in side:
                job.launch.signal_all(signal.SIGSTOP)
                seen = [line for line in job.lines() if line["step"] > first[job.name]]
                job.measured.setdefault(name, []).append(seen)


def _config(folder: str, name: str, ranks: int, batch: int, backbone: str) -> dict:
    return {
        "name": name, "run_folder": folder,
        "data": {"train": {"url": folder + "/data"}, "image_size": 64, "streams": ranks, "open_shards": 2, "workers": 1,
                 "augment": {"crop": "random_resized"}},
        "model": {"backbone": backbone, "expected_positives": 1.2}, "method": {"name": "en_scl"},
        "phases": [{"name": "all", "epochs": 1000, "batch": batch * ranks, "lr": 1e-4}],
        "train": {"log_every": 1, "checkpoint_every": "1000ep"},
    }
