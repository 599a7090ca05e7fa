"""The work of a search: brackets of trials for every method, round after round while there is a budget."""

from __future__ import annotations

import json
import time
from typing import Any

from lacuna.basics import storage
from lacuna.tools.trials.job import Job, Outcome, placed
from lacuna.tools.trials.ledger import Ledger, slim
from lacuna.tools.trials.readiness import Readiness
from lacuna.tools.trials.watching import all_epochs
from lacuna.tools.tune.budget import Contender, Tune
from lacuna.tools.tune.halving import Bracket, rung_epochs, rung_parts
from lacuna.trainer.config.sections import Config

DEFAULT_TRIALS = 27
_LEAST = 9  # trials of a round


class Timer:
    """Time that a search has taken, over all its launches; written down as it goes."""

    def __init__(self, folder: str):
        self._url = storage.join(folder, "elapsed.json")
        self._started, self._before = time.monotonic(), 0.0
        if storage.exists(self._url):
            self._before = json.loads(storage.read_bytes(self._url))["seconds"]

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def write(self) -> None:
        storage.write_atomic(self._url, json.dumps({"seconds": round(self.seconds(), 1)}).encode(), durable=False)


class SearchWork:
    """What `work_through` asks."""

    def __init__(self, contenders: list[Contender], tune: Tune, out: str, ledger: Ledger, ranks: int = 1):
        self.contenders, self.tune, self.out, self.ledger = {c.method: c for c in contenders}, tune, out, ledger
        self._ranks, self._ready = ranks, Readiness()
        self.timer = Timer(out)
        self.epochs = max(all_epochs(self.config(method, 0)) for method in self.contenders)
        trials = tune.trials or DEFAULT_TRIALS
        if tune.hours is not None:  # rounds of the smallest bracket that has all rungs, and keeps some workers busy
            trials = max(_LEAST, rung_parts(self.epochs, self.epochs, tune.first_rung, tune.halving)[0])
        self.parts = rung_parts(trials, self.epochs, tune.first_rung, tune.halving)
        self._size, self._round = trials, 0
        self.brackets: dict[str, Bracket] = {}  # of this round, by method
        self.outcomes: dict[tuple[str, int], dict[int, Outcome]] = {}  # (method, trial) → rung → what came of it
        self._slim: set[tuple[str, int]] = set()
        self._places: dict[str, tuple[str, int, int]] = {}  # label of a job → method, trial, rung

    def config(self, method: str, trial: int) -> Config:
        contender = self.contenders[method]
        made = placed(contender.body_of(trial), storage.join(self.out, "trials"), trial_name(method, trial),
                      contender.where)
        assert made.data.test is None, "a trial cannot read the test set"
        return made

    @property
    def deadline(self) -> float | None:
        return None if self.tune.hours is None else time.time() + self.tune.hours * 3600 - self.timer.seconds()

    def begin(self) -> list[Job]:
        numbers = list(range(self._round * self._size, (self._round + 1) * self._size))
        self.brackets = {method: Bracket(self.parts, self.tune.halving, numbers) for method in self.contenders}
        # Trial by trial, not method by method: whenever it ends, all methods have had their share.
        return [self._job(method, number, 0) for number in numbers for method in self.contenders]

    def done(self, job: Job, outcome: Outcome) -> list[Job]:
        method, trial, rung = self._places[job.label]
        self.outcomes.setdefault((method, trial), {})[rung] = outcome
        bracket = self.brackets[method]
        going_on = bracket.report(trial, outcome)
        self._drop(method)
        if going_on is None:
            return []
        if not bracket.over:
            return [self._job(method, number, bracket.rung) for number in going_on]
        if self.tune.hours is None or not all(bracket.over for bracket in self.brackets.values()):
            return []
        self._round += 1
        return self.begin()

    def _job(self, method: str, trial: int, rung: int) -> Job:
        config = self.config(method, trial)
        epochs = rung_epochs(config, self.parts[rung], self.tune.first_rung)
        if rung + 1 == len(self.parts):
            epochs = 0
        job = Job(trial_name(method, trial), config, epochs, self._ready.key(config), self._ranks,
                  self.deadline)
        self._places[job.label] = (method, trial, rung)
        return job

    def _drop(self, method: str) -> None:
        """Weights of trials that nobody goes on with, except the method's best."""
        best = self.best(method)
        for of, trial in set(self.outcomes) - self._slim:
            if of == method and trial != best and trial not in self.brackets[method].alive:
                slim(self.config(method, trial))
                self._slim.add((method, trial))

    def best(self, method: str | None = None) -> int | None:
        """The trial of a method that came furthest, and of those the one with the best score."""
        return max((trial for of, trial in self.outcomes if of == method and self.standing(of, trial) is not None),
                   key=lambda trial: self.standing(str(method), trial) or (0, 0.0, 0), default=None)

    def standing(self, method: str, trial: int) -> tuple[int, float, int] | None:
        """To rank trials by: rung reached, score there, and of equals the first; None: it has no score."""
        scored = {rung: o.score for rung, o in self.outcomes[method, trial].items()
                  if o.status != "failed" and o.score is not None}
        if not scored:
            return None
        rung = max(scored)
        return rung, scored[rung], -trial  # type: ignore[return-value]

    def best_method(self) -> str | None:
        """By the same rule, over all methods."""
        found = {m: self.standing(m, t) for m in self.contenders if (t := self.best(m)) is not None}
        return max(found, key=lambda m: found[m] or (0, 0.0, 0), default=None)

    def epochs_left(self, jobs: list[Job]) -> float:
        """Of jobs that wait and of the rungs that follow."""
        left = float(sum((job.epochs or self.epochs) - self._reached(job) for job in jobs))
        for bracket in self.brackets.values():
            count = len(bracket.alive)
            for rung in range(bracket.rung + 1, len(self.parts)):
                count = max(1, count // self.tune.halving)
                left += count * self.epochs * (1 / self.parts[rung] - 1 / self.parts[rung - 1])
        return left

    def _reached(self, job: Job) -> int:
        _, _, rung = self._places[job.label]
        return 0 if rung == 0 else rung_epochs(job.config, self.parts[rung - 1], self.tune.first_rung)

    def summary(self) -> str:
        method = self.best_method()
        if method is None:
            return "No trial has a score yet."
        trial = self.best(method)
        assert trial is not None
        rung, score, _ = self.standing(method, trial) or (0, 0.0, 0)
        how = "" if rung + 1 == len(self.parts) else " so far"
        return f"Best{how}: {trial_name(method, trial)} with val mAP {score:.2f}."

    def facts(self) -> list[dict[str, Any]]:
        """One entry per trial, in the order of methods and numbers."""
        return [self._fact(method, trial) for method in self.contenders
                for trial in sorted(t for m, t in self.outcomes if m == method)]

    def _fact(self, method: str, trial: int) -> dict[str, Any]:
        outcomes, config = self.outcomes[method, trial], self.config(method, trial)
        last = outcomes[max(outcomes)]
        epochs = rung_epochs(config, self.parts[max(outcomes)], self.tune.first_rung)
        going = trial in self.brackets[method].alive
        status = last.status if last.status in ("failed", "finished") else "going on" if going else "dropped"
        return {"trial": trial_name(method, trial), "method": method, "number": trial,
                "settings": self.contenders[method].settings(trial), "status": status,
                "epochs": epochs or all_epochs(config), "score": last.score, "first_score": outcomes[0].score,
                "curve": last.curve, "reason": last.reason, "seconds": last.seconds, "folder": config.folder}


def trial_name(method: str, trial: int) -> str:
    return f"{method}-{trial:04d}"
