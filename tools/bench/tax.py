"""What per-sample state costs a training step: step time of a method ÷ AN's, same model, state out of core.

Ratios (ResNet-18 at 64 px, L = 1000, one torch thread, RAM budget at most a quarter of the state):
  role, en_cl, en_scl     whole step of the method (en_scl with top-10 heatmaps) ÷ whole step of AN
  role_state, en_cl_state, en_scl_state   1 + time in state calls (lease, gather, scatter, release) ÷ step of AN
Methods take turns step by step, so that other load on the machine hits all alike; medians of all steps. Beside them:
`ratios_of_means` (a rare stall counts too; load from elsewhere as well), and `boundary_ms` per step: what the ends and
beginnings of epochs cost (flush of the state, EN's cut-offs), spread over the steps of these very short epochs.
`batches` is a checksum of each method's samples, pictures and labels: all methods saw the same.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import Dataset, Sample
from lacuna.tools.bench.noise_pictures import Noise
from lacuna.trainer import world as worlds
from lacuna.trainer.assemble import build_run
from lacuna.trainer.checkpoints.checkpoint import Position
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.loop import take_step
from lacuna.trainer.phase import Phase
from lacuna.trainer.sample_state import NoState, SampleState
from lacuna.trainer.state_rows import StateRows
from lacuna.trainer.whole_run import Run, open_state

_METHODS: dict[str, dict] = {
    "an": {"name": "an"},
    "role": {"name": "role"},
    "en_cl": {"name": "en_cl"},
    "en_scl": {"name": "en_scl", "top_k": 10},
}
_WARM_UP, _FEWEST_STEPS = 2, 5  # steps of each method


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=32, help="images a step (default 32)")
    parser.add_argument("--classes", type=int, default=1000, help="classes (default 1000)")
    parser.add_argument("--images", type=int, help="of the dataset (default 4096, quick: 2048)")
    parser.add_argument("--backbone", default="torchvision:resnet18", help="(default torchvision:resnet18)")
    parser.add_argument("--seconds", type=float, help="of measurement (default 120, quick: 25)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    seconds = args.seconds or (25 if quick else 120)
    count = args.images or (2048 if quick else 4096)
    if args.batch < 1 or args.classes < 10 or count < 32:
        raise UserError(f"--batch {args.batch}, --classes {args.classes}, --images {count}: give at least 1, 10, 32.")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lacuna-tax-") as folder:
        joined = worlds.start(600)
        watchdog = worlds.Watchdog(joined, 600)
        make_data(folder, args.classes, count, count // 32)
        racers = [Racer(folder, name, args, joined, watchdog) for name in _METHODS]
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(racers[-1].whole) < _FEWEST_STEPS:
            for racer in racers:
                racer.step()
        watchdog.stop()
        report = _report(racers)
        for racer in racers:
            racer.close()
    return report


def _report(racers: list[Racer]) -> dict:
    whole, inside = ({r.name: float(np.median(getattr(r, kind)[_WARM_UP:])) for r in racers}
                     for kind in ("whole", "inside"))
    base = whole[racers[0].name]
    ratios, means = {}, {}
    for racer in racers[1:]:
        means[racer.name] = round(float(np.mean(racer.whole[_WARM_UP:]) / np.mean(racers[0].whole[_WARM_UP:])), 3)
        ratios[racer.name] = round(whole[racer.name] / base, 3)
        ratios[racer.name + "_state"] = round(1 + inside[racer.name] / base, 3)
    budgets = {r.name: round(r.budget_share, 3) for r in racers[1:]}
    boundary = {r.name: round(1e3 * sum(r.boundary) / len(r.whole), 1) for r in racers}
    return {"ratios": ratios, "ratios_of_means": means, "boundary_ms": boundary,
            "step_ms": {name: round(1e3 * seconds, 3) for name, seconds in whole.items()},
            "state_ms": {name: round(1e3 * seconds, 3) for name, seconds in inside.items()},
            "steps": {r.name: len(r.whole) for r in racers}, "batches": {r.name: r.seen for r in racers},
            "budget_over_state": budgets}


class _TimedState:
    """The state with a clock around everything that a step asks of it."""

    def __init__(self, inner: SampleState | NoState, clock: Clock):
        self.inner, self.clock = inner, clock

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[_TimedRows]:
        held = self.inner.step(batch)
        rows = self.clock.around(held.__enter__)()
        yield _TimedRows(rows, self.clock)
        self.clock.around(held.__exit__)(None, None, None)


class _TimedRows:
    def __init__(self, inner: StateRows, clock: Clock):
        self.inner, self.clock = inner, clock

    def narrow(self, start: int, stop: int) -> _TimedRows:
        return _TimedRows(self.clock.around(self.inner.narrow)(start, stop), self.clock)

    def __getattr__(self, name: str):
        return self.clock.around(getattr(self.inner, name))


class Clock:
    """Seconds spent inside the calls that it is put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable) -> Callable:
        def call(*args):
            began = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - began
            return result
        return call


class Racer:
    """One method's run, advanced step by step."""

    def __init__(self, folder: str, name: str, args: argparse.Namespace, world: worlds.World,
                 watchdog: worlds.Watchdog):
        self.name, self.budget_share, self.seen = name, 0.0, 0
        self.whole: list[float] = []
        self.inside: list[float] = []
        self.boundary: list[float] = []
        config = _config(folder, name, args.batch, args.backbone)
        self.run: Run = build_run(config, world, watchdog)
        per_row = sum(field.row_bytes for field in self.run.method.fields())
        if per_row:
            total = per_row * int(self.run.sources["train"].counts.sum())
            self.budget_share = 0.25
            budget = total * self.budget_share / 2**20
            self.run.config = config.model_copy(
                update={"train": config.train.model_copy(update={"state_budget_mb": budget})})
            self.run.checkpoints.begin_launch()
            open_state(self.run, None)
        self.phase = Phase(self.run, 0, None)
        self.state, self.clock = self.run.state, Clock()
        self.epoch, self.position = 0, Position()
        self.batches: Iterator[Batch] = iter(())

    def step(self) -> None:
        batch = next(self.batches, None)
        if batch is None:
            batch = self._next_epoch()
        self.clock.seconds = 0.0
        began = time.perf_counter()
        take_step(self.phase, batch, self.position)
        self.whole.append(time.perf_counter() - began)
        self.inside.append(self.clock.seconds)
        for part in (batch.shards, batch.rows, batch.inputs.numpy(), batch.labels.numpy()):
            self.seen = zlib.crc32(part.tobytes(), self.seen)

    def _next_epoch(self) -> Batch:
        state, began = self.state, time.perf_counter()
        if self.epoch:
            state.end_epoch()
        self.epoch += 1
        plan = self.phase.plans[self.epoch]
        self.run.state = state
        self.run.method.begin_epoch(self.phase.epoch_start(self.epoch))
        if isinstance(state, SampleState):
            self.run.state = _TimedState(state, self.clock)  # type: ignore[assignment]
        state.begin_epoch(plan, 0, self.epoch)
        self.boundary.append(time.perf_counter() - began)
        self.run.model.train()
        self.batches = iter(self.phase.stream(plan, Position(epoch=self.epoch)))
        return next(self.batches)

    def close(self) -> None:
        self.state.close()
        self.run.run_log.close()


def _config(folder: str, name: str, batch: int, backbone: str):
    return parse_config({
        "name": name, "run_folder": folder + "/runs",
        "data": {"train": {"url": folder + "/data"}, "image_size": 64, "streams": 1, "open_shards": 2, "workers": 1,
                 "augment": {"crop": "random_resized"}},
        "model": {"backbone": backbone, "expected_positives": 1.2}, "method": _METHODS[name],
        "phases": [{"name": "all", "epochs": 1000, "batch": batch, "lr": 1e-4}],
    }, "bench tax")


def make_data(folder: str, classes: int, count: int, rows_per_shard: int) -> None:
    """`folder`/data: pictures with one known label each."""
    labels = SparseLabels.from_lists([[i % classes] for i in range(count)], [[]] * count, UNKNOWN)
    samples = [Sample(f"noise-{i:06d}", Noise(i), "jpg") for i in range(count)]
    pack(Dataset([str(c) for c in range(classes)], samples, labels, "train"), folder + "/data",
         Layout(streams=1, rows_per_shard=rows_per_shard))
