"""Which method closes how much of the gap between one label per image and full labels, on real COCO features.

  lacuna bench quality --data DIR                     all methods, 3 seeds (resumable: results are kept in --out)
  lacuna bench quality --data DIR --methods an role --seeds 1
DIR (or LACUNA_EVAL_DATA) holds coco_features/ (train/test features, labels with one published positive per image).
Protocol: a linear layer on fixed features; every method has the same number of trials, chosen by mAP on a fifth of the
training images with seed 0; the best settings are run with every seed and tested once.
Gap closed = (method − AN) / (oracle − AN), oracle = full labels.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil

import numpy as np

from data_pipelines.annotate import split_rows
from data_pipelines.annotate_rows import LabelledRows
from data_pipelines.errors import UserError
from data_pipelines.index import SidecarWriter
from data_pipelines.labels import UNKNOWN, SparseLabels
from data_pipelines.packing import Layout, pack
from data_pipelines.readers import features
from trainer import loop
from trainer import world as worlds
from trainer.assemble import build_run
from trainer.config import parse_config
from trainer.run_log import log

_LRS = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
# Six trials each. No trial uses an oracle: K and k come from the validation images.
TRIALS: dict[str, list[dict]] = {
    "oracle": [{"lr": lr, "labels": "labels", "method": {"name": "bce"}} for lr in _LRS],
    "an": [{"lr": lr, "method": {"name": "an"}} for lr in _LRS],
    "an_ls": [{"lr": lr, "method": {"name": "an_ls"}} for lr in _LRS],
    "wan": [{"lr": lr, "method": {"name": "wan"}} for lr in _LRS],
    "epr": [{"lr": lr, "method": {"name": "epr"}} for lr in _LRS],
    "en": [{"lr": lr, "method": {"name": "en"}} for lr in _LRS],
    "en_cl": [{"lr": lr, "method": {"name": "en_cl", "gamma": gamma}} for lr in _LRS[1:4] for gamma in (0.1, 1.0)],
    "role": [{"lr": lr, "method": {"name": "role", "lr": phi}} for lr in _LRS[1:4] for phi in (1e-2, 3e-2)],
    "em": [{"lr": lr, "method": {"name": "em"}} for lr in _LRS],
    "ll_r": [{"lr": lr, "method": {"name": "ll_r"}} for lr in _LRS],
    "gr": [{"lr": lr, "method": {"name": "gr"}} for lr in _LRS],
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("LACUNA_EVAL_DATA"), help="folder with coco_features/")
    parser.add_argument("--out", default="runs/quality", help="shards and results (default: runs/quality)")
    parser.add_argument("--methods", nargs="+", default=list(TRIALS), choices=list(TRIALS), metavar="NAME",
                        help=f"default: {' '.join(TRIALS)}")
    parser.add_argument("--seeds", type=int, help="default 3, quick: 1")
    parser.add_argument("--epochs", type=int, help="default 15, quick: 2")


def run(quick: bool, args: argparse.Namespace) -> dict:
    if not args.data or not os.path.isdir(os.path.join(args.data, "coco_features")):
        raise UserError(f"--data {args.data!r}: no folder coco_features in it. Give --data or set LACUNA_EVAL_DATA.")
    seeds, epochs = args.seeds or (1 if quick else 3), args.epochs or (2 if quick else 15)
    methods = ["an", "oracle"] if quick else args.methods
    prepare(os.path.join(args.data, "coco_features"), args.out)
    joined = worlds.start(600)
    watchdog = worlds.Watchdog(joined, 600)
    bench = Bench(args.out, epochs, joined, watchdog)
    scores = {}
    for method in methods:
        trials = TRIALS[method][1:3] if quick else TRIALS[method]
        best = max(trials, key=lambda trial: bench.score(trial, 0)["val"])
        scores[method] = [bench.score(best, seed)["test"] for seed in range(seeds)]
        print(f"{method:<8} {np.mean(scores[method]):6.2f} ± {np.std(scores[method]):.2f}   {best}", flush=True)
    watchdog.stop()
    table = _table(scores)
    return {"ratios": {m: row["gap_closed"] for m, row in table.items()}, "table": {"features": table}}


def _table(scores: dict[str, list[float]]) -> dict[str, dict]:
    low, high = (float(np.mean(scores[m])) if m in scores else float("nan") for m in ("an", "oracle"))
    return {method: {"map": round(float(np.mean(s)), 2), "std": round(float(np.std(s)), 2),
                     "gap_closed": round((float(np.mean(s)) - low) / (high - low), 3)} for method, s in scores.items()}


class Bench:
    """Runs trials in this process and remembers their scores on disk."""

    def __init__(self, out: str, epochs: int, world: worlds.World, watchdog: worlds.Watchdog):
        self.out, self.epochs, self.world, self.watchdog = out, epochs, world, watchdog
        self.path = os.path.join(out, "scores.jsonl")
        self.known: dict[str, dict] = {}
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as f:
                self.known = {line["key"]: line for line in map(json.loads, f)}

    def score(self, trial: dict, seed: int) -> dict:
        """{"val": mAP, "test": mAP} at the best validation epoch."""
        key = json.dumps([trial, seed, self.epochs])
        if key not in self.known:
            self.known[key] = {"key": key, **self._train(trial, seed)}
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(self.known[key]) + "\n")
        return self.known[key]

    def _train(self, trial: dict, seed: int) -> dict:
        folder = os.path.join(self.out, "trial")
        shutil.rmtree(folder, ignore_errors=True)
        data = os.path.join(self.out, "data")
        config = parse_config({
            "name": "trial", "run_folder": self.out, "seed": seed, "method": trial["method"],
            "data": {"train": {"url": data + "/train", "labels": trial.get("labels", "single"), "subset": "train"},
                     "val": {"url": data + "/train", "subset": "val"}, "test": {"url": data + "/test"},
                     "streams": 4, "workers": 1},
            "model": {"backbone": "features"},
            "phases": [{"name": "linear", "epochs": self.epochs, "batch": 16, "lr": trial["lr"]}],
            "train": {"log_every": 500, "keep": 1},
        }, "bench quality")
        run = build_run(config, self.world, self.watchdog)
        log.setLevel("WARNING")
        results = loop.train(run)
        assert results is not None
        run.run_log.close()
        if run.state:
            run.state.close()
        found = {"val": results["val"]["map"], "test": results["test"]["map"]}
        print(f"  {trial} seed {seed}: val {found['val']:.2f} test {found['test']:.2f}", flush=True)
        return found


def prepare(source: str, out: str) -> None:
    """Shards of the features with sidecars `labels` (full) and `single`, and a validation split; made once."""
    for split in ("train", "test"):
        url = os.path.join(out, "data", split)
        if os.path.exists(os.path.join(url, "index.json")):
            continue
        with open(os.path.join(source, f"{split}_labels.tsv"), encoding="utf-8") as f:
            rows = list(csv.DictReader(f, delimiter="\t"))
        with open(os.path.join(source, "classes.txt"), encoding="utf-8") as f:
            classes = sum(1 for line in f if line.strip())
        full = np.zeros((len(rows), classes), np.int8)
        for i, row in enumerate(rows):
            full[i, [int(c) for c in row["full"].split()]] = 1
        os.makedirs(out, exist_ok=True)
        matrix = os.path.join(out, f"{split}_full.npy")
        np.save(matrix, full)
        index = pack(features.read(os.path.join(source, f"{split}_features.npy"), matrix,
                                   os.path.join(source, "classes.txt"), split=split), url, Layout())
        writer = SidecarWriter(index, "single", UNKNOWN, {"from": "published single positives"})
        for shard in range(len(index.shards)):
            chosen = [[int(c) for c in rows[p]["single"].split()] for p in index.members(shard).positions]
            writer.write(shard, SparseLabels.from_lists(chosen, [[]] * len(chosen)))
        sidecar = writer.close()
        if split == "train":
            split_rows(LabelledRows(index, sidecar), ("train", "val"))
