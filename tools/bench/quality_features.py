"""The linear protocol of `bench quality`: trials on fixed features, each a run of the trainer in this process.

Scores are kept in scores.jsonl and every trial is a run folder until it is finished, so a killed benchmark goes on
where it was, and several processes may share the work by method.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import numpy as np
import torch

from data_pipelines.plan import EpochPlan
from data_pipelines.source import ShardSource
from data_pipelines.stream import EpochStream
from tools.bench.quality_trials import Annotation, Trial
from tools.neighbors.making import Wishes, make_neighbors
from tools.passes.pool import PoolSettings, open_pool
from trainer import loop
from trainer import world as worlds
from trainer.assemble import build_run
from trainer.config import Config, parse_config
from trainer.evaluate import EVAL_BATCH, eval_maker
from trainer.methods import METHODS
from trainer.neighbors import FACTS_NAME
from trainer.priors import write_prior
from trainer.run_log import log

BATCH = 16


class Trials:
    """Trains what has no score yet."""

    def __init__(self, data: str, out: str, epochs: int):
        self.data, self.out, self.epochs = data, out, epochs
        self.world = worlds.start(600)
        self.watchdog = worlds.Watchdog(self.world, 600)
        self.path = os.path.join(out, "scores.jsonl")

    def close(self) -> None:
        self.watchdog.stop()

    def choose(self, annotation: Annotation, method: str, trials: list[Trial]) -> Trial:
        """The trial with the best validation mAP with seed 0; the test images have no part in it."""
        return max(trials, key=lambda trial: self.score(annotation, method, trial, 0)["val"])

    def score(self, annotation: Annotation, method: str, trial: Trial, seed: int) -> dict:
        """{"val": mAP, "test": mAP} at the best validation epoch, "curve": validation mAP of every epoch."""
        labels = trial.get("labels", annotation.labels)
        key = json.dumps([labels, trial, seed, self.epochs], sort_keys=True)
        known = self._known()
        if key not in known:
            known[key] = {"key": key, **self._train(annotation, method, trial, seed, labels, key)}
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(known[key]) + "\n")
        return known[key]

    def _known(self) -> dict[str, dict]:
        if not os.path.exists(self.path):
            return {}
        with open(self.path, encoding="utf-8") as f:
            return {line["key"]: line for line in map(json.loads, f)}

    def _train(self, annotation: Annotation, method: str, trial: Trial, seed: int, labels: str, key: str) -> dict:
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        body = dict(trial["method"])
        if method in annotation.after:
            body["prior"] = self.prior_path(annotation.labels, annotation.after[method], seed)
        if METHODS[body["name"]].needs_neighbors:
            body["neighbors"] = self.neighbors(labels)
        config = self._config(name, seed, trial["lr"], body, labels)
        run = build_run(config, self.world, self.watchdog)
        log.setLevel("WARNING")
        results = loop.train(run)
        if results is None:
            raise SystemExit("stopped as asked; the same command goes on")
        found = {"val": results["val"]["map"], "test": results["test"]["map"], "curve": _curve(config)}
        if method in annotation.priors:
            found["means"] = mean_scores(run).tolist()
        run.run_log.close()
        if run.state:
            run.state.close()
        shutil.rmtree(config.folder)
        best = int(np.argmax(found["curve"])) + 1
        print(f"  {method} {json.dumps(trial)} seed {seed}: val {found['val']:.2f} (epoch {best} of {self.epochs}), "
              f"test {found['test']:.2f}", flush=True)
        return found

    def _config(self, name: str, seed: int, lr: float, method: dict, labels: str) -> Config:
        train, test = os.path.join(self.data, "train"), os.path.join(self.data, "test")
        return parse_config({
            "name": name, "run_folder": os.path.join(self.out, "trials"), "seed": seed, "method": method,
            "data": {"train": {"url": train, "labels": labels, "subset": "train"},
                     "val": {"url": train, "subset": "val"}, "test": {"url": test}, "streams": 4, "workers": 1},
            "model": {"backbone": "features"},
            "phases": [{"name": "linear", "epochs": self.epochs, "batch": BATCH, "lr": lr}],
            "train": {"log_every": 500, "keep": 1},
        }, "bench quality")

    def neighbors(self, labels: str) -> str:
        """Neighbours of the training images, made when they are first needed."""
        url = os.path.abspath(os.path.join(self.out, "neighbors", labels))
        if not os.path.exists(os.path.join(url, FACTS_NAME)):
            with open_pool(PoolSettings()) as pool:
                make_neighbors(pool, self.source(labels), None, url, Wishes())
        return url

    def prior_path(self, labels: str, method: str, seed: int) -> str:
        return os.path.join(self.out, "priors", f"{labels}-{method}-{self.epochs}-{seed}.json")

    def write_prior(self, labels: str, method: str, seed: int, means: list[float]) -> None:
        """Where trials of a method that needs this one's prior will look for it."""
        path = self.prior_path(labels, method, seed)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_prior(path, self.source(labels).index.classes, np.array(means))

    def source(self, labels: str) -> ShardSource:
        return ShardSource.load(os.path.join(self.data, "train"), labels, "train")


def _curve(config: Config) -> list[float]:
    """Validation mAP of every epoch."""
    with open(os.path.join(config.folder, "metrics.jsonl"), encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    return [round(line["val_map"], 3) for line in lines if "val_map" in line]


def mean_scores(run: loop.Run) -> np.ndarray:
    """float64 [L]: the mean probability of every class over the training images, with the weights that were tested."""
    source = run.sources["train"]
    plan = EpochPlan(source.rows, 0, 0, 1, EVAL_BATCH, open_shards=1, shuffle=False)
    total, samples = torch.zeros(source.classes, dtype=torch.float64), 0
    run.model.eval()
    with EpochStream(source, plan, range(1), eval_maker(run.config, source), workers=1) as stream, torch.no_grad():
        for batch in stream:
            total += torch.sigmoid(run.model(batch.inputs)[0]).double().sum(0)
            samples += len(batch)
    return (total / samples).numpy()
