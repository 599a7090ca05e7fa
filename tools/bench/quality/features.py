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

from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.bench.quality.teacher import is_table, scored, write_table
from lacuna.tools.bench.quality.trials import TEACHERS, Annotation, Trial
from lacuna.tools.neighbors.making import Wishes, make_neighbors
from lacuna.tools.passes.pool import PoolSettings, open_pool
from lacuna.trainer import whole_run
from lacuna.trainer import world as worlds
from lacuna.trainer.assemble import build_run
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.methods import example
from lacuna.trainer.neighbors import FACTS_NAME
from lacuna.trainer.priors import read_prior, write_prior
from lacuna.trainer.run_log import log

BATCH, TUNED_BATCH, TUNED_EPOCHS = 16, 256, 10
# λ belongs to a loss that sums over classes and is a mean over images. Most are means over classes, too: λ/L for them.
# These sum over the images as well, as published: λ times the batch.
_SUM_OVER_CLASSES, _SUM_OVER_ALL = ("softmax",), ("asl", "hill", "splc")
_JUDGED_FROM = 4  # epochs of a trial before it may be given up


class Trials:
    """Trains what has no score yet."""

    def __init__(self, data: str, out: str, epochs: int):
        self.data, self.out, self.epochs = data, out, epochs
        self.world = worlds.start(600)
        self.watchdog = worlds.Watchdog(self.world, 600)
        self.path = os.path.join(out, "scores.jsonl")

    def close(self) -> None:
        self.watchdog.stop()

    def choose(self, annotation: Annotation, method: str, trials: list[Trial], seed: int) -> Trial:
        """The trial with the best validation mAP with this seed; the test images have no part in it.

        A trial that even at its last epoch's rate could not reach the best one before it is given up.
        """
        best = -1.0
        for trial in trials:
            score = self.score(annotation, method, trial, seed, best, test=False)["val"]
            if score > best:
                best, chosen = score, trial
        return chosen

    def score(self, annotation: Annotation, method: str, trial: Trial, seed: int, to_beat: float = -1.0,
              test: bool = True) -> dict:
        """{"val": mAP, "test": mAP} at the best validation epoch, "curve": validation mAP of every epoch.

        With test=False the test images are not there at all: trials are chosen on validation images alone. A trial
        that was given up is trained again where it has less to beat.
        """
        if annotation.tuned:
            to_beat = -1.0  # under a cosine schedule the end decides
        labels = trial.get("labels", annotation.labels)
        body = dict(trial["method"])
        if method in annotation.after:
            body["prior"] = self.prior_path(annotation.labels, annotation.after[method], seed)
        epochs = self._epochs(annotation.tuned)
        facts = [labels, trial, seed, epochs, annotation.tuned]
        if "prior" in body:  # another prior makes it another trial
            index = self.source(labels).index
            prior = read_prior(body["prior"], len(index.classes), index.classes)
            facts.append(hashlib.sha256(prior.tobytes()).hexdigest()[:16])
        key = json.dumps(facts, sort_keys=True)
        known = self._known()
        kept = known.get(key)
        if kept is None or (test and "test" not in kept) or (
                len(kept["curve"]) < epochs and not cannot_reach(kept["curve"], to_beat, epochs)):
            known[key] = {"key": key, **self._train(annotation, method, trial, body, seed, labels, key, to_beat, test)}
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(known[key]) + "\n")
        return known[key]

    def _known(self) -> dict[str, dict]:
        if not os.path.exists(self.path):
            return {}
        with open(self.path, encoding="utf-8") as f:
            return {line["key"]: line for line in map(json.loads, f)}

    def _train(self, annotation: Annotation, method: str, trial: Trial, body: dict, seed: int, labels: str, key: str,
               to_beat: float, test: bool) -> dict:
        """`body`: the trial's method with the files that it needs."""
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        needs = example(body["name"]).needs()
        if needs.neighbors:
            body["neighbors"] = self.neighbors(labels)
        if needs.scores:
            body["scores"] = self.table(labels, trial.get("teacher", "an"))
        config = self._config(name, seed, trial, body, labels, annotation.tuned, test)
        run = build_run(config, self.world, self.watchdog)
        run.stop = stop = GiveUp(config, to_beat)
        log.setLevel("WARNING")
        results = whole_run.train(run)
        if results is None and not stop.hopeless:
            raise SystemExit("stopped as asked; the same command goes on")
        curve = read_curve(config)
        found: dict = {"val": max(curve), "curve": curve}
        if results is not None and test:
            found["test"] = results["test"]["map"]
        if results is not None and method in annotation.priors:
            found["means"] = mean_scores(run).tolist()
        run.run_log.close()
        run.state.close()
        shutil.rmtree(config.folder)
        best = int(np.argmax(curve)) + 1
        ending = "" if results else f", given up after epoch {len(curve)}"
        print(f"  {method} {json.dumps(trial)} seed {seed}: val {found['val']:.2f} "
              f"(epoch {best} of {self._epochs(annotation.tuned)}){ending}", flush=True)
        return found

    def _epochs(self, tuned: bool) -> int:
        return min(self.epochs, TUNED_EPOCHS) if tuned else self.epochs

    def _config(self, name: str, seed: int, trial: Trial, method: dict, labels: str, tuned: bool = False,
                test: bool = False) -> Config:
        train = os.path.join(self.data, "train")
        model: dict = {"backbone": "features", "head_bias": "default"}
        phase: dict = {"name": "linear", "epochs": self._epochs(tuned), "batch": BATCH, "lr": trial["lr"]}
        if tuned:
            model |= {"head_bias": "prior", "head_norm": "l2"}
            decay = trial["decay"]
            if method["name"] in _SUM_OVER_ALL:
                decay *= TUNED_BATCH
            elif method["name"] not in _SUM_OVER_CLASSES:
                decay /= len(self.source(labels).index.classes)
            phase |= {"batch": TUNED_BATCH, "schedule": "cosine",
                      "head_weight_decay": decay}
        return parse_config({
            "name": name, "run_folder": os.path.join(self.out, "trials"), "seed": seed, "method": method,
            "data": {"train": {"url": train, "labels": labels, "subset": "train"},
                     "val": {"url": train, "subset": "val"},
                     "test": {"url": os.path.join(self.data, "test")} if test else None, "streams": 4, "workers": 1},
            "model": model, "phases": [phase], "train": {"log_every": 500, "keep": 1},
        }, "bench quality")

    def neighbors(self, labels: str) -> str:
        """Neighbours of the training images, made when they are first needed."""
        url = os.path.abspath(os.path.join(self.out, "neighbors", labels))
        if not os.path.exists(os.path.join(url, FACTS_NAME)):
            with open_pool(PoolSettings()) as pool:
                make_neighbors(pool, self.source(labels), None, url, Wishes())
        return url

    def table(self, labels: str, teacher: str) -> str:
        """Scores of a teacher for the training images, made when they are first needed."""
        url = os.path.abspath(os.path.join(self.out, "tables", f"{labels}-{teacher}-{self.epochs}"))
        if not is_table(url):
            trial = TEACHERS[teacher]
            config = self._config(f"teacher-{labels}-{teacher}", 0, trial, trial["method"], labels)
            run = build_run(config, self.world, self.watchdog)
            whole_run.train(run)
            write_table(url, run, ShardSource.load(os.path.join(self.data, "train"), labels, None))
            run.run_log.close()
            run.state.close()
            shutil.rmtree(config.folder)
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


class GiveUp(whole_run.Stop):
    """Asks a run to stop when its validation curve says that it cannot win."""

    def __init__(self, config: Config, to_beat: float):
        self.hopeless, self._signalled = False, False
        super().__init__()
        self._config, self._to_beat, self._size = config, to_beat, -1
        self._path = os.path.join(config.folder, "metrics.jsonl")

    @property
    def asked(self) -> bool:  # type: ignore[override]
        if self._to_beat > 0 and not self.hopeless:
            size = os.stat(self._path).st_size if os.path.exists(self._path) else -1
            if size != self._size:
                self._size = size
                self.hopeless = cannot_reach(read_curve(self._config), self._to_beat, self._config.phases[0].epochs)
        return self._signalled or self.hopeless

    @asked.setter
    def asked(self, value: bool) -> None:
        self._signalled = value


def cannot_reach(curve: list[float], to_beat: float, epochs: int) -> bool:
    """Curves flatten: one that does not get there at the rate of its last epoch does not get there."""
    if len(curve) < _JUDGED_FROM or len(curve) >= epochs or max(curve) > to_beat:
        return False
    return curve[-1] + max(0.0, curve[-1] - curve[-2]) * (epochs - len(curve)) < to_beat


def read_curve(config: Config) -> list[float]:
    """Validation mAP of every epoch so far."""
    with open(os.path.join(config.folder, "metrics.jsonl"), encoding="utf-8") as f:
        lines = [json.loads(line) for line in f if line.endswith("\n")]
    return [round(line["val_map"], 3) for line in lines if "val_map" in line]


def mean_scores(run: whole_run.Run) -> np.ndarray:
    """float64 [L]: the mean probability of every class over the training images, with the weights that were tested."""
    source = run.sources["train"]
    total, samples = torch.zeros(source.classes, dtype=torch.float64), 0
    for batch, scores in scored(run, source):
        total += scores.double().sum(0)
        samples += len(batch)
    return (total / samples).numpy()
