"""How much faster an epoch is when a phase with a fixed backbone reads a cache: the product's loop, with and without.

EfficientNet-lite0 at 160 px, photos of coco_photos (DIR or LACUNA_EVAL_DATA; --quick without either generates photos),
only the head learns, one torch thread, random-resized crops. Ratios:
  epoch_speedup        AN: seconds of an epoch without a cache ÷ with a full one (pooled features)
  epoch_speedup_maps   EN+SCL: the same with feature maps, heatmaps of every sample included in both
  fill_overhead        seconds of the epoch that fills the cache ÷ without a cache (pooled), and fill_overhead_maps
Plain and filling epochs take turns, so that other load on the machine hits both alike; of each kind the median.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.tools.bench.quality.data import dataset, label_rows
from lacuna.tools.bench.quality.generated import generate_photos
from lacuna.tools.bench.quality.lite0 import LITE0, SIZE, lite0_weights
from lacuna.trainer import world as worlds
from lacuna.trainer.assemble import build_run
from lacuna.trainer.checkpoints.checkpoint import Position
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.loop import train_epoch
from lacuna.trainer.phase import Phase
from lacuna.trainer.whole_run import Run, open_state

_METHODS = {"": {"name": "an"}, "_maps": {"name": "en_scl"}}
_BATCH, _READS = 32, 3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("LACUNA_EVAL_DATA"),
                        help="folder with coco_photos/ (default: LACUNA_EVAL_DATA)")
    parser.add_argument("--photos", type=int, help="how many (default 1024, quick: 128)")
    parser.add_argument("--rounds", type=int, help="of a plain and a filling epoch (default 3, quick: 2)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    count, rounds = args.photos or (128 if quick else 1024), args.rounds or (2 if quick else 3)
    if count < _BATCH or rounds < 1:
        raise UserError(f"--photos {count}, --rounds {rounds}: give at least {_BATCH} and 1.")
    torch.set_num_threads(1)
    ratios: dict[str, float] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="lacuna-cache-") as folder, _joined() as (world, watchdog):
        made = args.data or (generate_photos(folder, count) if quick else None)
        if made is None:
            raise UserError("--data: give the folder that holds coco_photos/, or set LACUNA_EVAL_DATA; --quick without "
                            "either generates photos.")
        photos = os.path.join(made, "coco_photos")
        rows = label_rows(os.path.join(photos, "train_labels.tsv"))[:count]
        pack(dataset(photos, "train", rows), os.path.join(folder, "shards"),
             Layout(streams=1, rows_per_shard=max(_BATCH, count // 8)), workers=1)
        weights = lite0_weights(folder, needed=False)
        for ending, method in _METHODS.items():
            epochs = _Epochs(folder, method, weights, rounds, world, watchdog)
            plain, fill, read = epochs.measure()
            ratios[f"epoch_speedup{ending}"] = round(plain / read, 2)
            ratios[f"fill_overhead{ending}"] = round(fill / plain, 3)
            seconds |= {f"plain{ending}": plain, f"fill{ending}": fill, f"read{ending}": read}
    return {"ratios": ratios, "photos": count, "backbone": LITE0, "image_size": SIZE,
            "seconds": {name: round(value, 3) for name, value in seconds.items()}}


class _Epochs:
    """Epochs of one method, with and without a cache."""

    def __init__(self, folder: str, method: dict, weights: str, rounds: int, world: worlds.World,
                 watchdog: worlds.Watchdog):
        self.folder, self.method, self.weights, self.rounds = folder, method, weights, rounds
        self.world, self.watchdog = world, watchdog

    def measure(self) -> tuple[float, float, float]:
        """Seconds of an epoch (plain, filling, reading)."""
        with self._begun("plain", None) as plain, self._begun("cached", {"views": self.rounds}) as cached:
            pairs = [_both(plain, cached, number) for number in range(self.rounds)]
            reads = [_epoch(cached, self.rounds + number) for number in range(_READS)]
        plain_seconds, fill_seconds = np.median(np.array(pairs), axis=0).tolist()
        return plain_seconds, fill_seconds, float(np.median(reads))

    @contextlib.contextmanager
    def _begun(self, name: str, cache: dict | None) -> Iterator[Phase]:
        run = build_run(self._config(f"{name}-{self.method['name']}", cache), self.world, self.watchdog)
        run.checkpoints.begin_launch()
        run.run_log.rewind(0, run.checkpoints.hold)
        open_state(run, None)
        try:
            yield Phase(run, 0, None)
        finally:
            run.state.close()
            run.run_log.close()

    def _config(self, name: str, cache: dict | None):
        return parse_config({
            "name": name, "run_folder": os.path.join(self.folder, "runs"),
            "data": {"train": {"url": os.path.join(self.folder, "shards")}, "image_size": SIZE, "normalize": "centered",
                     "streams": 1, "open_shards": 4, "workers": 1, "augment": {"crop": "random_resized", "flip": True}},
            "model": {"backbone": LITE0, "weights": self.weights, "expected_positives": 2.9}, "method": self.method,
            "phases": [{"name": "linear", "epochs": self.rounds + _READS, "batch": _BATCH, "lr": 1e-3,
                        "trainable": "head", "cache": cache}],
            "train": {"channels_last": True},
        }, "bench cache")


def _both(plain: Phase, cached: Phase, number: int) -> tuple[float, float]:
    """Seconds of either, in turn one of them first: the first one of all meets cold files and kernels."""
    if number % 2:
        return _epoch(plain, number), _epoch(cached, number)
    second = _epoch(cached, number)
    return _epoch(plain, number), second


def _epoch(phase: Phase, number: int) -> float:
    run: Run = phase.run
    began = time.perf_counter()
    run.method.begin_epoch(phase.epoch_start(number))
    phase.sums.begin_epoch()
    train_epoch(phase, Position(epoch=number))
    run.state.end_epoch()
    return time.perf_counter() - began


@contextlib.contextmanager
def _joined() -> Iterator[tuple[worlds.World, worlds.Watchdog]]:
    with worlds.joined(600) as world:
        watchdog = worlds.Watchdog(world, 600)
        try:
            yield world, watchdog
        finally:
            watchdog.stop()
