"""Training from object storage against local disk: throughput with every request 50 ms late and a fixed 100 ms step.

Ratio vs_local: samples a second on an S3 server with that latency ÷ on local disk, once prefetch is warm. Shards,
label sidecars and per-sample state (label estimates with their Adam moments) are all remote; the time that a model
would compute is slept, so that only waiting for storage can slow the loop down. `checksum`, the same on both sides:
of every batch's samples, pictures and labels and of the state rows read for it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.basics import storage
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream
from lacuna.tools.bench.s3_stand_in import serving
from lacuna.tools.bench.tax import make_data
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Task
from lacuna.trainer.sample_state import SampleState
from lacuna.trainer.world import World

_BATCH, _STREAMS, _ROWS, _SIDE, _CLASSES = 32, 2, 128, 64, 200
_WARM_UP = 10  # steps: every stream has opened its first shards by then


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--latency-ms", type=float, default=50, help="of every request (default 50)")
    parser.add_argument("--step-ms", type=float, default=100, help="that a step computes (default 100)")
    parser.add_argument("--steps", type=int, help="measured (default 400, quick: 120)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    torch.set_num_threads(1)
    steps = args.steps or (120 if quick else 400)
    with tempfile.TemporaryDirectory(prefix="lacuna-remote-") as folder:
        make_data(folder, _CLASSES, (steps + _WARM_UP) * _BATCH, _ROWS)
        local = _measure(folder, args.step_ms / 1e3)
        with serving(args.latency_ms / 1e3) as variables, environment(variables):
            _upload(folder + "/data", "s3://bench/data")
            remote = _measure("s3://bench", args.step_ms / 1e3)
    return {"ratios": {"vs_local": round(remote.rate / local.rate, 3)},
            "local": local.report(), "remote": remote.report(),
            "latency_ms": args.latency_ms, "step_ms": args.step_ms}


@dataclass(frozen=True)
class Measured:
    """Seconds of every warm step: waiting for data, waiting for state, and the whole."""

    data: np.ndarray
    state: np.ndarray
    whole: np.ndarray
    checksum: int

    @property
    def rate(self) -> float:
        return _BATCH * len(self.whole) / float(self.whole.sum())

    def report(self) -> dict:
        return {"samples_per_second": round(self.rate, 1), "data_wait_ms": round(float(self.data.mean()) * 1e3, 2),
                "state_wait_ms": round(float(self.state.mean()) * 1e3, 2), "checksum": self.checksum}


def _measure(root: str, step_seconds: float) -> Measured:
    """One epoch from `root`/data with state in `root`/state."""
    source = ShardSource.load(storage.join(root, "data"), "labels", None)
    plan = EpochPlan(source.counts, 1, 0, _STREAMS, _BATCH, open_shards=2)
    task = Task(source.classes, int(source.counts.sum()), source.sidecar.positives, source.sidecar.negatives, False,
                expected_positives=1.2)
    world = World(torch.device("cpu"))
    state = SampleState(storage.join(root, "state"), build_method({"name": "role"}, task),
                        source, world, 64 << 20, 0, None)
    maker = SampleMaker(Augment(_SIDE, crop="random_resized"), 1, 0)
    fields = list(state.store.schema.fields)
    times, checksum = [], 0
    with EpochStream(source, plan, range(_STREAMS), maker, workers=1) as stream:
        state.begin_epoch(plan, 0, 0)
        batches = iter(stream)
        for _ in range(plan.steps):
            began = time.perf_counter()
            batch = next(batches)
            got = time.perf_counter()
            with state.step(batch) as rows:
                values = {field: rows.read(field) for field in fields}
                leased = time.perf_counter()
                time.sleep(max(0.0, step_seconds))
                computed = time.perf_counter()
                rows.write({field: value for field, value in values.items()})
            ended = time.perf_counter()
            times.append((got - began, leased - got + ended - computed, ended - began))
            for part in (batch.shards, batch.rows, batch.inputs, batch.labels, *values.values()):
                checksum = zlib.crc32(np.asarray(part).tobytes(), checksum)
        state.end_epoch()
    state.close()
    kept = np.array(times[_WARM_UP:]).T
    return Measured(kept[0], kept[1], kept[2], checksum)


def _upload(folder: str, url: str) -> None:
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            storage.upload(path, storage.join(url, os.path.relpath(path, folder)))


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """The credentials and endpoint of the user come back at the end."""
    from s3fs import S3FileSystem

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    S3FileSystem.clear_instance_cache()
    try:
        yield
    finally:
        S3FileSystem.clear_instance_cache()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
