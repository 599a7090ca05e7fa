"""Memory and time of a training rank do not grow with the number of samples N.

A real run (linear model on feature shards, L = 1000) of ROLE, whose state is the largest: label estimates with their
Adam moments. Ratios over N = 50 k, 500 k and 5 M (quick: the first two), largest ÷ smallest:
  rss_growth               peak resident memory of the rank over the measured steps
  time_per_sample_growth   seconds a sample, once the first steps are over
Also an epoch of running scores at the size of OpenImages (9 M × 9,600, uint8 with histograms), measured on a share of
its shards and extrapolated; `wrong_rows` counts those that differ from the same updates in plain numpy (0 expected).
The large sets take the disk of a few shards: their tars are links.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time

import numpy as np
import yaml

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.basics.process_memory import peak_resident_bytes
from lacuna.state_store import Field
from lacuna.tools.bench.linked_shards import make_linked
from lacuna.tools.launches import Launch, command, environment, read_lines

_ROWS, _CLASSES, _BATCH, _BUDGET_MB = 500, 1000, 32, 96
_SIZES = (50_000, 500_000, 5_000_000)
_STEPS, _WARM_UP = 500, 100
_OPENIMAGES = (9_000_000, 9_600)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"measured per size (default {_STEPS})")
    parser.add_argument("--sizes", type=int, nargs="+", help="N, smallest first (default 50000 500000 5000000, quick: "
                        "the first two)")
    parser.add_argument("--classes", type=int, default=_CLASSES, help=f"of the run (default {_CLASSES})")
    parser.add_argument("--share", type=float, help="of the OpenImages shards (default 0.005, quick: 0.0005)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    sizes = args.sizes or (_SIZES[:2] if quick else _SIZES)
    if len(sizes) < 2 or min(sizes) < 4 * _ROWS or sorted(set(sizes)) != list(sizes):
        raise UserError(f"--sizes {' '.join(map(str, sizes))}: give at least two rising numbers from {4 * _ROWS} on.")
    if args.steps < 40:
        raise UserError(f"--steps {args.steps}: give at least 40, the first half warms up.")
    with tempfile.TemporaryDirectory(prefix="lacuna-memory-") as folder:
        measured = {size: _measure(folder, size, args.steps, args.classes) for size in sizes}
        openimages = _openimages(os.path.join(folder, "openimages"), args.share or (0.0005 if quick else 0.005))
    small, large = measured[sizes[0]], measured[sizes[-1]]
    return {"ratios": {"rss_growth": round(large["peak_mb"] / small["peak_mb"], 3),
                       "time_per_sample_growth": round(large["us_per_sample"] / small["us_per_sample"], 3)},
            "sizes": {str(size): facts for size, facts in measured.items()}, "openimages": openimages}


def _measure(folder: str, samples: int, steps: int, classes: int) -> dict:
    """One rank that trains on N samples for some steps, and is then asked to stop."""
    name = f"n-{samples}"
    data = os.path.join(folder, "data", name)
    make_linked(data, os.path.join(folder, "data", "base"), samples // _ROWS, _ROWS, classes)
    config = os.path.join(folder, name + ".yaml")
    with open(config, "w", encoding="utf-8") as f:
        yaml.safe_dump({
            "name": name, "run_folder": folder, "model": {"backbone": "features", "expected_positives": 1.2},
            "data": {"train": {"url": data}, "streams": 2, "open_shards": 2, "workers": 1},
            "method": {"name": "role"},
            "phases": [{"name": "all", "epochs": 100, "batch": _BATCH, "lr": 1e-3, "optimizer": "sgd"}],
            "train": {"log_every": 20, "state_budget_mb": _BUDGET_MB, "checkpoint_every": f"{steps}st"},
        }, f)
    metrics = os.path.join(folder, name, "metrics.jsonl")
    launch = Launch(command(1, "--config", config), os.path.join(folder, name + ".out"), environment(), folder)

    def lines() -> list[dict]:
        return [line for line in read_lines(metrics) if line["kind"] == "train"]

    try:
        launch.wait_until(lambda: bool(lines()) and lines()[-1]["step"] >= steps, f"step {steps}")
        peak = peak_resident_bytes(launch.process.pid) / 2**20
    finally:
        launch.signal_all(signal.SIGKILL)
        launch.wait()
    rates = [line["samples_per_second"] for line in lines() if line["step"] > min(_WARM_UP, steps // 2)]
    return {"peak_mb": round(peak, 1), "us_per_sample": round(1e6 / statistics.median(rates), 1),
            "steps": lines()[-1]["step"]}


def _openimages(url: str, share: float) -> dict:
    """Read, update and write back every row of a share of the shards, as an epoch of EN does; two epochs."""
    samples, classes = _OPENIMAGES
    rows = 500
    shards = max(4, round(samples / rows * share))
    field = Field("score", (classes,), "uint8", range=(0, 1), stochastic=True, histogram=True)
    store = state_store.create(url, [rows] * (samples // rows), "bench", [field])
    rng = np.random.default_rng(0)
    # Most classes are far from any image: scores are small, with a tail.
    fresh = (rng.beta(0.3, 6.0, (64, classes)) * 255).astype(np.uint8)
    seconds = []
    with store.session(store.begin_launch(), budget=12 * 2 * rows * classes) as session:
        for epoch in range(2):
            began = time.perf_counter()
            session.begin(list(range(shards)), epoch)
            for shard in range(shards):
                session.lease(shard)
                for start in range(0, rows, 64):
                    at = np.arange(start, min(start + 64, rows))
                    batch = session.at(np.full(len(at), shard), at)
                    batch.scatter("score", batch.gather("score") // 2 + fresh[: len(at)] // 2)
                session.release(shard)
            session.finish()
            seconds.append(time.perf_counter() - began)
        written = session.metrics.bytes_written
        expected = (fresh // 2 // 2 + fresh // 2)[np.arange(rows) % 64]
        wrong = sum(int((session.read_shard("score", shard) != expected).any(axis=1).sum()) for shard in range(shards))
    whole = samples / (shards * rows)
    return {"share": round(1 / whole, 5), "epoch_hours_one_rank": round(seconds[-1] * whole / 3600, 2),
            "dense_gb": round(samples * classes / 1e9, 1), "disk_gb": round(written / 2 * whole / 1e9, 1),
            "us_per_sample": round(1e6 * seconds[-1] / (shards * rows), 1), "wrong_rows": wrong}
