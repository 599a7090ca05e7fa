"""Runs that a SIGTERM ends in the middle of an epoch, and that go on: `pretended_stops.py JOBS OUT DEVICE`.

JOBS: a list of configs; DEVICE: pretended or cpu. Every run is launched twice with the trainer's own start to end. The
signal comes inside a step, while rows of it are on their way. OUT gets, per run, where it stopped and digests of that
checkpoint's weights, method state and stored rows, and the same of the end. Rows land late, so that a checkpoint that
did not wait for them would lack them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from lacuna.trainer import engine, whole_run, world
from lacuna.trainer.assemble import build_run
from lacuna.trainer.checkpoints.commits import METHOD, MODEL
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.on_device.rows import NewRows
from lacuna.trainer.sample_state import SampleState
from lacuna.trainer.whole_run import Run
from tests.helpers import pretended_device
from tests.helpers.pretended_device import OnDevice
from tests.helpers.pretended_runs import digest

SIGNALLED = 4  # the step, counted from 1, in which the signal comes: the first of the second epoch; one more is taken
LATE = 0.3  # seconds
_OPTIMIZER = engine._optimizer
_LAND = NewRows.land


def main(jobs: str, out: str, device: str) -> None:
    joined = world.start(120)
    if device == pretended_device.NAME:
        joined.device = pretended_device.register()
    engine._optimizer = lambda groups, phase, compiled: _OPTIMIZER(groups, phase, True)  # as in pretended_runs.py
    NewRows.land = _land_late  # type: ignore[method-assign]
    watchdog = world.Watchdog(joined, 600)
    found = {}
    for body in json.loads(Path(jobs).read_text()):
        config = parse_config(body, jobs)
        try:
            with OnDevice():
                stopped = build_run(config, joined, watchdog)
                signal_inside(stopped)
                with stopped.stop:
                    assert whole_run.train(stopped) is None
                middle = held(stopped)
                again = build_run(config, joined, watchdog)
                assert whole_run.train(again) is not None
                found[config.name] = {"middle": middle, "end": held(again)}
        except Exception:
            found[config.name] = {"failed": traceback.format_exc()}
    Path(out).write_text(json.dumps(found))


def _land_late(rows: NewRows) -> None:
    time.sleep(LATE)
    _LAND(rows)


def signal_inside(run: Run) -> None:
    loss, calls = run.method.loss, 0

    def with_signal(outputs, batch, step):
        nonlocal calls
        calls += 1
        if calls == SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(outputs, batch, step)

    run.method.loss = with_signal  # type: ignore[method-assign]


def held(run: Run) -> dict:
    """What the newest checkpoint holds."""
    checkpoint = run.checkpoints.begin_launch()
    assert checkpoint is not None
    assert isinstance(run.state, SampleState)
    reader = run.state.store.reader(checkpoint.name)
    found = {"position": checkpoint.position.total_steps, "rows": digest(reader, reader.refs)}
    for name in (MODEL, METHOD):
        tensors = load_file(os.path.join(checkpoint.folder, name))
        found[name] = hashlib.sha256(b"".join(_bytes(tensors[key]) for key in sorted(tensors))).hexdigest()
    run.state.close()
    run.run_log.close()
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.numpy()).tobytes()


if __name__ == "__main__":
    main(*sys.argv[1:4])
    sys.stdout.flush()
    os._exit(0)
