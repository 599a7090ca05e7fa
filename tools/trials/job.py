"""One run of the trainer, or a part of one: what a worker is told, what it does, and what it reports."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import yaml

from lacuna.basics import storage
from lacuna.basics.deaths import describe_exit
from lacuna.basics.errors import UserError
from lacuna.basics.refusals import refusal
from lacuna.trainer.cache.views import cache_url
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.run_folder import METRICS
from lacuna.trainer.run_log import metric_lines

Status = Literal["finished", "paused", "stopped", "failed", "refused"]
SCORE = "val_map_skip_empty"
_REASON = 600  # characters of a reason that are kept
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    name: str
    """Of the trial, among those of its ledger."""
    config: Config
    epochs: int = 0
    """Over all phases, after which it pauses; 0: to its end."""
    key: str = ""
    """Names everything that its numbers depend on."""
    ranks: int = 1
    deadline: float | None = None
    """Time (of day) at which it is asked to stop."""
    cwd: str = field(default_factory=os.getcwd)
    """What relative paths of the config start from, whoever does the job."""

    @property
    def label(self) -> str:
        return f"{self.name}@{self.epochs}" if self.epochs else self.name


@dataclass(frozen=True)
class Outcome:
    """What a job came to. `paused`: it reached its epochs; `stopped`: asked to, before that; `failed`: the trial is to
    blame; `refused`: the machine is (no room, no permission), and every other job would meet the same."""

    status: Status
    score: float | None = None
    """Best validation mAP of the phase reached, in percent, classes without positives skipped."""
    curve: list[float] = field(default_factory=list)
    """Validation mAP of every evaluation so far."""
    reason: str = ""
    seconds: float = 0.0
    """Of this job and of those of the same trial before it."""
    results: dict[str, Any] = field(default_factory=dict)
    """results.json of a finished run."""
    key: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def perform(job: Job, before: float = 0.0) -> Outcome:
    """Train, from wherever an earlier job has come to; an error is an outcome. `before`: seconds of earlier jobs."""
    started = time.monotonic()
    config = job.config.model_copy(update={"train": job.config.train.model_copy(update={"stop_after": job.epochs})})
    if not os.path.isdir(job.cwd):
        return Outcome("refused", reason=f"{job.cwd}: no such folder on {os.uname().nodename}; start from one that all "
                                         "nodes see")
    with contextlib.chdir(job.cwd):
        status, reason, results = (_in_this_process if job.ranks == 1 else _by_a_launcher)(job, config)
        curve, score = read_curve(config.folder)
        if status == "stopped" and job.epochs and epochs_done(config.folder) >= job.epochs:
            status = "paused"
    return Outcome(status, score, curve, reason[:_REASON], round(before + time.monotonic() - started, 2), results,
                   job.key)


def _in_this_process(job: Job, config: Config) -> tuple[Status, str, dict]:
    from lacuna.trainer import launch, world  # torch and DeepSpeed: only workers need them
    from lacuna.trainer.whole_run import Stop

    stop = Stop()
    try:
        with world.on_its_own(), _asking(stop, job.deadline):
            outcome = launch.train_and_go_on(config, stop)
    except UserError as error:
        # Said in the words of whoever met it (a cache on a full disk), it is the machine's fault all the same.
        refused = isinstance(error.__cause__, OSError) and refusal(error.__cause__)
        return ("refused", str(error).rstrip("."), {}) if refused else ("failed", str(error), {})
    except Exception as error:
        refused = refusal(error)
        if refused:
            return "refused", refused, {}
        trace = traceback.extract_tb(error.__traceback__)
        at = f" ({os.path.basename(trace[-1].filename)}:{trace[-1].lineno})" if trace else ""
        return "failed", f"{type(error).__name__}: {error}{at}", {}
    return ("stopped", "", {}) if outcome.stopped else ("finished", "", _results(config.folder))


@contextlib.contextmanager
def _asking(stop: Any, deadline: float | None) -> Iterator[None]:
    if deadline is None:
        yield
        return
    timer = threading.Timer(max(0.0, deadline - time.time()), setattr, (stop, "asked", True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _by_a_launcher(job: Job, config: Config) -> tuple[Status, str, dict]:
    """Several ranks on the devices that Ray gave to this worker."""
    from lacuna.tools.launches import command, environment

    with tempfile.TemporaryDirectory(prefix="lacuna-trial-") as folder:
        path, output = os.path.join(folder, "config.yaml"), os.path.join(folder, "output.txt")
        with open(path, "w", encoding="utf-8") as f:
            yaml.safe_dump(config.model_dump(mode="json"), f, sort_keys=False)
        words = command(job.ranks, "--config", path)
        with open(output, "wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment(),
                                       preexec_fn=_end_with_the_worker)
        try:
            process.wait(None if job.deadline is None else max(0.0, job.deadline - time.time()))
        except subprocess.TimeoutExpired:
            process.terminate()  # a checkpoint is written, and it ends as asked
            process.wait()
        with open(output, encoding="utf-8", errors="replace") as f:
            said = [line.strip() for line in f if line.startswith(("lacuna: ", "rank ")) or "Error" in line]
    if process.returncode:
        return "failed", f"the launch {describe_exit(process.returncode)}. {said[-1] if said else ''}".strip(), {}
    results = _results(config.folder)
    done = results and epochs_done(config.folder) >= sum(phase.epochs for phase in config.phases)
    return ("finished", "", results) if done else ("stopped", "", {})


def _end_with_the_worker() -> None:
    """The launcher is asked to end when the worker that started it dies: nobody would wait for it any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _results(folder: str) -> dict:
    try:
        return json.loads(storage.read_bytes(storage.join(folder, "results.json")))
    except FileNotFoundError:
        return {}


def epoch_lines(folder: str) -> list[dict]:
    """What a run has written about its epochs so far."""
    try:
        lines = metric_lines(storage.read_bytes(storage.join(folder, METRICS)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line for line in lines if line["kind"] == "epoch"]


def epochs_done(folder: str) -> int:
    return len(epoch_lines(folder))


def read_curve(folder: str) -> tuple[list[float], float | None]:
    """Validation mAP of every evaluation so far, and the best one of the last phase: what its weights are chosen by."""
    lines = [line for line in epoch_lines(folder) if line.get(SCORE) is not None and line[SCORE] == line[SCORE]]
    curve = [round(line[SCORE], 3) for line in lines]
    return curve, max((line[SCORE] for line in lines if line["phase"] == lines[-1]["phase"]), default=None)


def placed(body: dict, folder: str, name: str, where: str) -> Config:
    """A checked config whose run lives in folder/name, with a place of its own for what it remembers per sample; what
    phases cache stays where it would be otherwise, shared by all of them."""
    config = parse_config({**body, "run_folder": folder, "name": name}, where)
    places = {}
    if config.train.state_url is not None:
        places["state_url"] = storage.join(config.train.state_url, name)
    if any(phase.cache for phase in config.phases):
        places["cache_url"] = cache_url(parse_config(body, where))
    return config.model_copy(update={"train": config.train.model_copy(update=places)}) if places else config
