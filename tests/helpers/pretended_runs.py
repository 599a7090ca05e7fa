"""Real runs on the pretended device, in a process of their own: `pretended_runs.py JOBS OUT DEVICE`.

JOBS: a list of configs; DEVICE: pretended, cpu, or compiled (on the CPU; torch.compile only counts graphs, and a break
in one is an error). Every run trains its first phase with the real loop, store, learner
and DeepSpeed engine. OUT gets, per run, the waits inside of every step, the losses of its epochs, digests of the
weights and of the stored rows, or how it failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lacuna.trainer import engine, loop, world
from lacuna.trainer.assemble import build_run
from lacuna.trainer.checkpoints.checkpoint import Position
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.phase import Phase
from lacuna.trainer.sample_state import SampleState
from lacuna.trainer.whole_run import Run, open_state
from tests.helpers import pretended_device
from tests.helpers.pretended_device import RECORD, OnDevice

MIDDLE = 1  # a snapshot after the second step, inside the first epoch
GRAPHS = CompileCounterWithBackend("eager")
_STEP, _OPTIMIZER = loop.take_step, engine._optimizer


def main(jobs: str, out: str, device: str) -> None:
    joined = world.start(120)
    if device == pretended_device.NAME:
        joined.device = pretended_device.register()
        assert isinstance(joined.device, torch.device)
    # Fused kernels exist for some devices only, and round differently.
    engine._optimizer = lambda groups, phase, compiled: _OPTIMIZER(groups, phase, True)
    if device == "compiled":
        compiled = Classifier.compile
        Classifier.compile = lambda model: compiled(model, backend=GRAPHS, fullgraph=True)
    watchdog = world.Watchdog(joined, 600)
    found = {}
    for config in json.loads(Path(jobs).read_text()):
        try:
            with contextlib.nullcontext() if device == "compiled" else OnDevice():
                torch._dynamo.reset()
                GRAPHS.clear()
                found[config["name"]] = train(build_run(parse_config(config, jobs), joined, watchdog))
                found[config["name"]]["graphs"] = GRAPHS.frame_count
        except Exception:
            found[config["name"]] = {"failed": traceback.format_exc()}
    Path(out).write_text(json.dumps(found))


def train(run: Run) -> dict:
    """Every epoch of the first phase, as phase.py goes through them, without evaluation and checkpoints."""
    counts: list[dict[str, int]] = []

    def step(phase, batch, position):
        with RECORD.step():
            result = _STEP(phase, batch, position)
        if len(counts) == MIDDLE:
            run.state.snapshot("middle")
        counts.append(dict(Counter(f"{wait.what} @ {wait.where}" for wait in RECORD.waits)))
        RECORD.waits.clear()
        return result

    loop.take_step = step
    RECORD.waits.clear()
    run.checkpoints.begin_launch()
    open_state(run, None)
    phase, position, losses = Phase(run, 0, None), Position(), []
    for epoch in range(run.config.phases[0].epochs):
        run.method.begin_epoch(phase.epoch_start(epoch))
        phase.sums.begin_epoch()
        position = loop.train_epoch(phase, position)
        run.state.end_epoch()
        losses.append(phase.sums.epoch(run.world, phase.plans[epoch].steps)[0])
        position = position.advanced(epoch=epoch + 1, step=0)
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in run.model.parameters())
    found = {"steps": counts, "ahead": 0, "losses": losses, "weights": hashlib.sha256(weights).hexdigest(),
             "rows": {}, "snapshot": {}}
    if isinstance(run.state, SampleState):
        found["ahead"] = run.state.traffic.ahead.hits if run.state.traffic else 0
        shards = range(len(run.sources["train"].index.shards))
        found["rows"] = digest(run.state.session, {field.name: shards for field in run.method.fields()})
        middle = run.state.store.reader("middle")
        found["snapshot"] = digest(middle, middle.refs)
    phase.close()
    run.state.close()
    run.run_log.close()
    return found


def digest(reader, places: dict[str, Iterable[int]]) -> dict[str, str]:
    """Of every field's stored rows in these shards."""
    return {name: hashlib.sha256(b"".join(np.ascontiguousarray(reader.read_shard(name, shard)).tobytes()
                                          for shard in sorted(shards))).hexdigest()
            for name, shards in sorted(places.items())}


if __name__ == "__main__":
    main(*sys.argv[1:4])
    sys.stdout.flush()
    os._exit(0)
