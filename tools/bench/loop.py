"""What a step of the loop costs on feature shards, beside a plain PyTorch loop over tensors in memory.

Ratios (CPU time of the main thread per step, which other load does not change; one torch thread, L = 80, Adam):
  step_cpu_vs_plain_16    AN at batch 16 ÷ a plain loop: index, linear, loss, backward, optimizer [≤ 1.4]
  step_cpu_vs_plain_256   the same at batch 256 [≤ 1.15]
  role_vs_plain_16        ROLE at batch 16 ÷ a plain loop with dense ROLE, φ and its Adam in memory [≤ 2.5]
Our side is the whole loop: stream from tars, state out of core, DeepSpeed engine, log lines. `process` has the same
ratios of the process's CPU time: decoding and state I/O in threads count there. Both sides take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F

from lacuna.basics.errors import UserError
from lacuna.tools.bench.linked_shards import make_linked, wide_vectors
from lacuna.trainer import world as worlds
from lacuna.trainer.assemble import build_run
from lacuna.trainer.checkpoints.checkpoint import Position
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.loop import train_epoch
from lacuna.trainer.phase import Phase
from lacuna.trainer.whole_run import open_state

_CLASSES, _ROWS, _K = 80, 500, 1.2
_CASES = {"step_cpu_vs_plain_16": ("an", 16), "step_cpu_vs_plain_256": ("an", 256), "role_vs_plain_16": ("role", 16)}
Cost = tuple[float, float]  # CPU seconds per step: of the main thread, of the process


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="of a turn (default 300, quick: 60)")
    parser.add_argument("--turns", type=int, help="of each side, after one that does not count (default 5, quick: 3)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    steps, turns = args.steps or (60 if quick else 300), args.turns or (3 if quick else 5)
    if min(steps, turns) < 1:
        raise UserError(f"--steps {steps}, --turns {turns}: give numbers above 0.")
    torch.set_num_threads(1)
    found: dict[str, dict] = {"ratios": {}, "process": {}, "main_thread_ms": {}}
    with tempfile.TemporaryDirectory(prefix="lacuna-loop-") as folder:
        joined = worlds.start(600)
        watchdog = worlds.Watchdog(joined, 600)
        for name, (method, batch) in _CASES.items():
            data = os.path.join(folder, f"data-{batch}")
            if not os.path.exists(data):
                make_linked(data, os.path.join(folder, "base"), -(-steps * batch // _ROWS), _ROWS, _CLASSES,
                            wide_vectors)
            ours, plain = Ours(folder, data, name, method, batch, joined, watchdog), Plain(method, batch)
            costs = [(ours.turn(), plain.turn(steps)) for _ in range(turns + 1)][1:]
            ours.close()
            for place, key in enumerate(("ratios", "process")):
                found[key][name] = round(statistics.median(a[place] / b[place] for a, b in costs), 3)
            found["main_thread_ms"][name] = [round(1e3 * statistics.median(c[side][0] for c in costs), 3)
                                             for side in (0, 1)]
        watchdog.stop()
    return {**found, "steps": steps, "turns": turns}


class Timer:
    def __enter__(self) -> Timer:
        self.began = time.thread_time(), time.process_time()
        return self

    def __exit__(self, *_) -> None:
        self.spent = time.thread_time() - self.began[0], time.process_time() - self.began[1]

    def per(self, steps: int) -> Cost:
        return self.spent[0] / steps, self.spent[1] / steps


class Ours:
    """A turn is an epoch."""

    def __init__(self, folder: str, data: str, name: str, method: str, batch: int, world: worlds.World,
                 watchdog: worlds.Watchdog):
        self.run = build_run(parse_config({
            "name": name, "run_folder": os.path.join(folder, "runs"),
            "data": {"train": {"url": data}, "streams": 1, "open_shards": 2},
            "model": {"backbone": "features", "expected_positives": _K}, "method": {"name": method},
            "phases": [{"name": "all", "epochs": 100, "batch": batch, "lr": 1e-3}],
        }, "bench loop"), world, watchdog)
        self.run.checkpoints.begin_launch()
        self.run.run_log.rewind(0, self.run.checkpoints.hold)
        open_state(self.run, None)
        self.phase, self.epoch = Phase(self.run, 0, None), 0

    def turn(self) -> Cost:
        self.run.method.begin_epoch(self.phase.epoch_start(self.epoch))
        self.phase.sums.begin_epoch()
        with Timer() as timer:
            train_epoch(self.phase, Position(epoch=self.epoch))
        self.run.state.end_epoch()
        self.epoch += 1
        return timer.per(self.phase.plans[0].steps)

    def close(self) -> None:
        self.phase.close()
        self.run.state.close()
        self.run.run_log.close()


class Plain:
    """What one would write without us, everything in memory."""

    def __init__(self, method: str, batch: int):
        self.batch, self.samples = batch, 4000
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(self.samples, 512, generator=generator)
        self.labels = torch.zeros(self.samples, _CLASSES)
        self.labels[torch.arange(self.samples), torch.arange(self.samples) % _CLASSES] = 1
        self.head = torch.nn.Linear(512, _CLASSES)
        learning = [{"params": list(self.head.parameters())}]
        self.phi = torch.nn.Parameter(torch.zeros(self.samples, _CLASSES)) if method == "role" else None
        if self.phi is not None:
            learning.append({"params": [self.phi]})
        self.optimizer = torch.optim.Adam(learning, lr=1e-3)

    def turn(self, steps: int) -> Cost:
        order = torch.randperm(self.samples).repeat(-(-steps * self.batch // self.samples))
        with Timer() as timer:
            for step in range(steps):
                self._step(order[step * self.batch : (step + 1) * self.batch])
        return timer.per(steps)

    def _step(self, rows: torch.Tensor) -> None:
        logits, labels = self.head(self.features[rows]), self.labels[rows]
        loss = (F.binary_cross_entropy_with_logits(logits, labels) if self.phi is None
                else role(logits, self.phi[rows], labels))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def role(logits: torch.Tensor, phi: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Dense ROLE as its paper states it: two cross entropies on the annotated, two with each other's estimate."""
    f, g = logits.sigmoid(), phi.sigmoid()

    def expected(p: torch.Tensor) -> torch.Tensor:
        return (p.sum(1).mean() - _K).square() / _CLASSES**2

    def against(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        known = -(labels * (p + 1e-5).log()).mean()
        return known + expected(p) - (q * (p + 1e-5).log() + (1 - q) * (1 - p + 1e-5).log()).mean()

    return (against(f, g.detach()) + against(g, f.detach())) / 2
