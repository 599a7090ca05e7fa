"""Training from Python."""

from __future__ import annotations

from dataclasses import dataclass

from lacuna.api.runs import RunReader, open_run
from lacuna.trainer import launch
from lacuna.trainer.config.sections import Config

__all__ = ["Results", "train"]


@dataclass(frozen=True)
class Results(launch.Outcome):
    """What training came to: `val` and `test` measures, `best_step`, `folder`, `stopped`; `run` reads the rest."""

    @property
    def run(self) -> RunReader:
        """The run folder: metrics, classes, weights, beliefs."""
        return open_run(self.folder)


def train(config: Config) -> Results:
    """Train in this process, or go on with a run that was interrupted.

        results = lacuna.train(lacuna.load_config("demo", "name=first"))
        results.test["map"], results.best_step, results.folder
        results.run.metrics.frame()      # the whole history

    A process alone is a world of one; in a process that a launcher started (deepspeed, torchrun) every rank calls it.
    On the main thread Ctrl-C and SIGTERM end the run after a checkpoint (`results.stopped`) and the same call resumes;
    on other threads signals are left alone. Handlers, logging, random numbers and the process group are put back
    afterwards, so that it may be called again. Mistakes in the input are `lacuna.UserError`s.
    """
    return Results(**vars(launch.train_and_go_on(config)))
