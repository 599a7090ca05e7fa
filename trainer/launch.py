"""One launch in this process: join the peers, build the run, train, and leave the process as it was."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.trainer import whole_run, world
from lacuna.trainer.assemble import build_run
from lacuna.trainer.config.sections import Config
from lacuna.trainer.whole_run import Run, Stop

RESULTS = "results.json"  # in the run folder
log = logging.getLogger("lacuna")


@dataclass(frozen=True)
class Outcome:
    """What a launch came to, the same on every rank."""

    folder: str
    """Folder or URL of the run."""
    stopped: bool = False
    """Asked to stop before the end: there are no results yet, and the same config resumes."""
    best_step: int | None = None
    """Step whose weights were chosen on the validation set; None without one."""
    best_score: float | None = None
    """Their validation mAP in percent, classes without positives skipped."""
    val: dict[str, float] = field(default_factory=dict)
    """Measures by name (`map`, `map_skip_empty`, …, in percent); empty without a validation set."""
    test: dict[str, float] = field(default_factory=dict)
    """The same on the test set."""
    held_out: dict[str, float] = field(default_factory=dict)
    """Without a validation set, with data.hold_out: `recall_at_1`, … of known labels (in percent), `threshold`, …"""

    @classmethod
    def of(cls, folder: str, results: dict | None):
        """From what results.json holds; None: the run has not come to its end."""
        if results is None:
            return cls(folder, stopped=True)
        return cls(folder, False, results["best_step"], results["val_map_skip_empty"], results.get("val", {}),
                   results.get("test", {}), results.get("held_out", {}))


def train(config: Config, hung: Callable[[str], None] | None = None, stop: Stop | None = None) -> Outcome:
    """Train in this process, alone or as a rank of the launch that its environment describes.

    Signals are listened to only on the main thread. Everything that was changed in the process (signal handlers, log
    handlers, random numbers, the process group of one) is put back, whatever happens. `hung` is told when training
    stands still; by default the error that follows says why. `stop` lets others ask this launch to end.
    """
    verdict: list[str] = []
    timeout = config.train.timeout_seconds
    with stop or Stop() as stop, _logs_put_back(), _draws_put_back(), world.joined(timeout) as joined:
        watchdog, whole = world.Watchdog(joined, timeout, hung or _note(verdict)), joined.size == 1
        try:
            with _closing(build_run(config, joined, watchdog, stop)) as run:
                outcome = _train(run)
            whole = True
            return outcome
        except RuntimeError as error:
            if verdict:  # the collective that stood still gave up
                raise UserError(verdict[0]) from error
            raise
        finally:
            watchdog.stop(whole)


def train_and_go_on(config: Config, stop: Stop | None = None) -> Outcome:
    """`train` in a process that does other things afterwards. A run's parts refer to each other in circles, which
    Python would free some day only: weights, caches and threads of process groups would pile up run after run."""
    try:
        return train(config, stop=stop)
    finally:
        gc.collect()


def _train(run: Run) -> Outcome:
    results = whole_run.train(run)
    if run.world.main and results is not None:
        run.run_log.check()
        path = storage.join(run.config.folder, RESULTS)
        storage.write_atomic(path, json.dumps(results, indent=1).encode())
        log.info("done: results in %s", path)
    elif run.world.main:
        log.info("stopped as asked; the same command resumes")
    return Outcome.of(run.config.folder, results)


@contextlib.contextmanager
def _closing(run: Run) -> Iterator[Run]:
    """After an error peers may be gone: then nothing waits for them."""
    whole = False
    try:
        yield run
        whole = True
    finally:
        run.run_log.close(whole)
        run.state.close()
        if whole:
            run.world.barrier()


@contextlib.contextmanager
def _logs_put_back() -> Iterator[None]:
    loggers = [log, logging.getLogger("DeepSpeed")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            for handler in logger.handlers:
                if handler not in handlers:
                    handler.close()
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


def _draws_put_back() -> contextlib.AbstractContextManager:
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _note(verdict: list[str]) -> Callable[[str], None]:
    def note(why: str) -> None:
        log.error(why)
        verdict.append(why)

    return note
