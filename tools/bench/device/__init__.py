"""How busy an accelerator is kept: the share of the time in which its compute queue has work, by method.

Ratios (B = 64, L = 1000; 1 means that the device never waits for the host):
  an, en_cl, role     on feature shards
  en_scl              on image shards of 64 × 64 JPEGs with 7 × 7 score maps, top-10 heatmaps
Without a GPU the accelerator is virtual: the real loop, methods, stream and state store run on tensors that have shapes
but no values. A step keeps the compute queue busy for 40 ms (forward 12, loss and backward 22, optimizer 6); copies
take bytes ÷ 12 GB/s on a second queue; a synchronisation holds the host until both are empty. Only the host's work is
real. On a GPU the same runs are measured with torch's profiler, with real models (`--virtual` for the pretended one).
Beside them, per step: `synchronisations`; on the virtual device `idle_after_them` (share of the time that the queue was
empty because of them) and the host's CPU time, of the main thread and of the process: other load does not change it.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.tools.bench.device import gpu, virtual
from lacuna.tools.bench.device.measuring import Found, measured
from lacuna.tools.bench.device.queues import QUEUES
from lacuna.tools.bench.linked_shards import make_linked, pictures, vectors
from lacuna.trainer import world as worlds
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.models.backbones import SOURCES
from lacuna.trainer.phase import Phase

METHODS: dict[str, dict] = {"an": {}, "en_cl": {}, "role": {}, "en_scl": {"top_k": 10}}
BATCH, CLASSES, WARM_UP = 64, 1000, 20
_ROWS = 500  # per shard
_SLOTS = 8  # shards that the state's RAM budget holds
_FORWARD, _BACKWARD, _OPTIMIZER = 0.012, 0.022, 0.006  # seconds of a step


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all four)")
    parser.add_argument("--steps", type=int, help="measured after 20 others (default 600, quick: 200)")
    parser.add_argument("--item", action="store_true", help="read one value back in every step, to see what it costs")
    parser.add_argument("--virtual", action="store_true", help="the virtual accelerator even if there is a GPU")


def run(quick: bool, args: argparse.Namespace) -> dict:
    steps = args.steps or (200 if quick else 600)
    if steps < 1:
        raise UserError(f"--steps {args.steps}: give a number above 0.")
    real = torch.cuda.is_available() and not args.virtual
    with tempfile.TemporaryDirectory(prefix="lacuna-device-") as folder:
        _make_data(folder, steps, args.methods)
        joined = worlds.start(600)
        watchdog = worlds.Watchdog(joined, 600)
        meter: VirtualMeter | gpu.GpuMeter = gpu.GpuMeter() if real else VirtualMeter(joined)
        found = {name: measured(_config(folder, name, real), joined, watchdog, meter, WARM_UP, steps, args.item)
                 for name in args.methods}
        watchdog.stop()
    return {"ratios": {name: round(result.utilisation, 4) for name, result in found.items()},
            "device": torch.cuda.get_device_name() if real else "virtual", "steps": steps, "batch": BATCH,
            **{key: {name: round(result.facts[key], 4) for name, result in found.items()}
               for key in next(iter(found.values())).facts}}


class VirtualMeter:
    """Gives the virtual queues a step's work, and reads their clock."""

    def __init__(self, world: worlds.World):
        world.device = virtual.register()
        SOURCES["virtual"] = lambda name, weights, size: (Precomputed(), Precomputed())
        self.around = virtual.OnDevice

    def attach(self, phase: Phase, first: int, last: int) -> None:
        QUEUES.ends.clear()
        phase.run.model.register_forward_hook(self._forward)
        phase.engine.optimizer.register_step_post_hook(self._stepped)

    def _forward(self, model: nn.Module, inputs: tuple, outputs: tuple) -> None:
        QUEUES.compute(_FORWARD)
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda gradient: QUEUES.compute(_BACKWARD))

    def _stepped(self, *_) -> None:
        QUEUES.compute(_OPTIMIZER)
        QUEUES.end_step()

    def found(self, first: int, last: int) -> Found:
        steps, spent = last - first, QUEUES.ends[last] - QUEUES.ends[first]
        busy = steps * (_FORWARD + _BACKWARD + _OPTIMIZER)
        return Found(busy / spent.time, {
            "samples_per_second": steps * BATCH / spent.time, "synchronisations": spent.synchronisations / steps,
            "idle_after_them": spent.idle_after_them / spent.time,
            "main_thread_ms": 1e3 * spent.main_thread / steps, "process_ms": 1e3 * spent.process / steps})


class Precomputed(nn.Module):
    """A backbone whose output is there already."""

    output: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("output", torch.rand(1, 512, 7, 7), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.output.expand(len(inputs), -1, -1, -1)


def _make_data(folder: str, steps: int, methods: list[str]) -> None:
    shards = -(-(WARM_UP + steps + 1) * BATCH // _ROWS)
    for kind, contents in (("features", vectors), ("images", pictures)):
        if any(_kind(name) == kind for name in methods):
            make_linked(os.path.join(folder, kind), os.path.join(folder, kind + "-base"), shards, _ROWS, CLASSES,
                        contents)


def _kind(method: str) -> str:
    return "images" if method == "en_scl" else "features"


def _config(folder: str, name: str, real: bool) -> Config:
    images = "torchvision:resnet50" if real else "virtual:precomputed"
    return parse_config({
        "name": name, "run_folder": folder + "/runs",
        "data": {"train": {"url": os.path.join(folder, _kind(name))}, "image_size": 224 if real else 64, "streams": 1,
                 "open_shards": 2, "augment": {"crop": "random_resized"}},
        "model": {"backbone": images if _kind(name) == "images" else "features", "expected_positives": 1.2},
        "method": {"name": name, **METHODS[name]},
        "phases": [{"name": "all", "epochs": 2, "batch": BATCH, "lr": 1e-4}],
    }, "bench device")
