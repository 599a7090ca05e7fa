"""The linear protocol of `bench quality`: rows on fixed features, trained and chosen as `lacuna table` does it.

A row is a set's name and a method's: features.role. What is there is not trained again; runs, outcomes and what methods
need (neighbours, tables of a teacher's scores, class priors) lie in the folder of --out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.bench.quality.data import FULL
from lacuna.tools.bench.quality.recipe import MODEL, SCHEDULE, head_decay
from lacuna.tools.bench.quality.teacher import is_table, write_table
from lacuna.tools.bench.quality.trials import TEACHERS, TUNED_TEACHER, Annotation, Trial
from lacuna.tools.neighbors.making import Wishes, make_neighbors
from lacuna.tools.passes.pool import PoolSettings, open_pool
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.prior import estimate
from lacuna.tools.table.rows import RowWork
from lacuna.tools.table.work import train_rows
from lacuna.tools.trials.crew import CrewSettings
from lacuna.trainer.config.tables import Row
from lacuna.trainer.methods import example
from lacuna.trainer.neighbors import FACTS_NAME
from lacuna.trainer.priors import write_prior

BATCH, TUNED_BATCH, TUNED_EPOCHS = 16, 256, 10


@dataclass(frozen=True)
class FeatureRows:
    data: str  # folder with the shards train and test
    out: str
    epochs: int
    crew: CrewSettings

    def train(self, name: str, annotation: Annotation, methods: dict[str, list[Trial]],
              seeds: range) -> dict[str, RowWork]:
        """method → its row, with its best trial tested under every seed; `methods`: what is tried of each."""
        rows: dict[str, RowWork] = {}
        for later in (False, True):  # those that need another one's prior come second
            some = {m: self._row(name, annotation, m, trials) for m, trials in methods.items()
                    if (m in annotation.after) == later}
            train_rows(list(some.values()), self.out, seeds, self.crew)
            rows |= some
            for method in some.keys() & set(annotation.after.values()):
                found = self.prior(some[method].chosen_folder, annotation.labels)
                write_prior(self.prior_path(annotation.labels, method), self.source(annotation.labels).index.classes,
                            found)
        return {method: rows[method] for method in methods}

    def _row(self, name: str, annotation: Annotation, method: str, trials: list[Trial]) -> RowWork:
        first = trials[0]
        labels = first.get("labels", annotation.labels)
        body = self.body(labels, annotation.tuned)
        return RowWork(f"{name}.{method}", Row(), body, [self._settings(annotation, method, trial, labels)
                                                         for trial in trials], f"bench quality: {name}.{method}")

    def _settings(self, annotation: Annotation, method: str, trial: Trial, labels: str) -> dict:
        own = dict(trial["method"])
        needs = example(own["name"]).needs()
        if needs.neighbors:
            own["neighbors"] = self.neighbors(labels)
        if needs.scores:
            own["scores"] = self.table(labels, trial.get("teacher", "an"), annotation.tuned)
        if method in annotation.after:
            own["prior"] = self.prior_path(annotation.labels, annotation.after[method])
        settings = self._learning(trial, labels) | {"method": own}
        if "full_weight" in trial:
            settings["train.fully_labelled_weight"] = trial["full_weight"]
            settings["data.fully_labelled"] = {"url": os.path.join(self.data, "train"), "subset": FULL}
        return settings

    def _learning(self, trial: Trial, labels: str) -> dict:
        settings = {"phases.0.lr": trial["lr"], "method": trial["method"]}
        if "decay" in trial:
            classes = len(self.source(labels).index.classes)
            settings["phases.0.head_weight_decay"] = head_decay(trial["method"]["name"], trial["decay"], classes,
                                                                TUNED_BATCH)
        return settings

    def body(self, labels: str, tuned: bool = False) -> dict:
        train = os.path.join(self.data, "train")
        epochs = min(self.epochs, TUNED_EPOCHS) if tuned else self.epochs
        phase: dict = {"name": "linear", "epochs": epochs, "batch": BATCH, "lr": 1e-3}
        if tuned:
            phase |= {"batch": TUNED_BATCH, "schedule": SCHEDULE}
        model = MODEL if tuned else {"head_bias": "default"}
        return {"name": "row", "method": {"name": "an"}, "phases": [phase], "train": {"log_every": 500, "keep": 1},
                "data": {"train": {"url": train, "labels": labels, "subset": "train"},
                         "val": {"url": train, "subset": "val"}, "test": {"url": os.path.join(self.data, "test")},
                         "streams": 4, "workers": 1},
                "model": {"backbone": "features", **model}}

    def prior(self, run: str, labels: str) -> np.ndarray:
        """float64 [L]: mean scores of a run over the training images."""
        return estimate(open_trained(run), self.source(labels), PoolSettings(self.crew.workers or None)).prior

    def neighbors(self, labels: str) -> str:
        """Neighbours of the training images, made when they are first needed."""
        url = os.path.abspath(os.path.join(self.out, "neighbors", labels))
        if not os.path.exists(os.path.join(url, FACTS_NAME)):
            with open_pool(PoolSettings(self.crew.workers or None)) as pool:
                make_neighbors(pool, self.source(labels), None, url, Wishes())
        return url

    def table(self, labels: str, teacher: str, tuned: bool) -> str:
        """Scores of a teacher for the training images, made when they are first needed."""
        name = f"{teacher}_tuned" if tuned else teacher
        url = os.path.abspath(os.path.join(self.out, "tables", f"{labels}-{name}-{self.epochs}"))
        if not is_table(url):
            trial = TUNED_TEACHER if tuned else TEACHERS[teacher]
            row = RowWork(f"teacher.{labels}.{name}", Row(), self.body(labels, tuned),
                          [self._learning(trial, labels)], "bench quality: teacher")
            train_rows([row], self.out, range(1), self.crew)
            write_table(url, open_trained(row.folders[0]), ShardSource.load(os.path.join(self.data, "train"), labels,
                                                                           None))
        return url

    def prior_path(self, labels: str, method: str) -> str:
        folder = os.path.abspath(os.path.join(self.out, "priors"))
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{labels}-{method}-{self.epochs}.json")  # of the search's seed, for all

    def source(self, labels: str) -> ShardSource:
        return ShardSource.load(os.path.join(self.data, "train"), labels, "train")
