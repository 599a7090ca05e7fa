"""Where the numbers of a run are shown besides its own files: `train.loggers`, written by rank 0 through its run log.

metrics.jsonl is the record, and only that and TensorBoard's files can be rewound. A service keeps what it was sent. So
it is handed a line only after the fence has been asked, and a resumed run goes on in the same run of the service: what
that has is not sent again (repeated steps have the same values anyway), what it lacks of earlier launches is caught up.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from typing import Protocol

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.trainer.config.sections import Config
from lacuna.trainer.run_folder import LOGGERS, RunFolder

EXTRAS = {"wandb": "wandb", "mlflow": "mlflow"}  # name in train.loggers and package → extra of setup.cfg


class Logger(Protocol):
    catches_up: bool
    """Wants the lines of earlier launches, too, and knows which of them it has."""

    def write(self, kind: str, step: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self, whole: bool) -> None:
        """`whole`: the launch ended as it should."""


def check_loggers(config: Config) -> None:
    """Before anything is created."""
    for name in config.train.loggers:
        if name in EXTRAS and importlib.util.find_spec(name) is None:
            raise UserError(f"train.loggers = {list(config.train.loggers)}: the package {name} is not installed. "
                            f"`pip install 'lacuna-trainer[{EXTRAS[name]}]'`, or leave {name!r} out.")


def open_loggers(config: Config, folder: RunFolder, at: int) -> list[Logger]:
    """Those that the config names; `at`: the last step that a checkpoint holds."""
    return [_OPEN[name](config, folder, at) for name in dict.fromkeys(config.train.loggers)]


def _tensorboard(config: Config, folder: RunFolder, at: int) -> Logger:
    from lacuna.trainer.loggers.tensorboard import TensorBoard  # each costs its package

    return TensorBoard(folder.path("tensorboard"), at)


def _wandb(config: Config, folder: RunFolder, at: int) -> Logger:
    from lacuna.trainer.loggers.wandb import WeightsAndBiases, new_identity

    return WeightsAndBiases(config, identity(folder, "wandb", new_identity))


def _mlflow(config: Config, folder: RunFolder, at: int) -> Logger:
    from lacuna.trainer.loggers.mlflow import MLflow, new_identity

    return MLflow(identity(folder, "mlflow", lambda: new_identity(config)))


_OPEN: dict[str, Callable[[Config, RunFolder, int], Logger]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def identity(folder: RunFolder, name: str, make: Callable[[], str]) -> str:
    """What the service calls this run: made by the first launch and kept beside the run, so that others go on there."""
    path = folder.path(LOGGERS)
    known: dict = {}
    if os.path.exists(path):
        try:
            known = dict(parse_json(storage.read_bytes(path)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: damaged ({error}). Remove it: the loggers then begin new runs.") from None
    if not isinstance(known.get(name), str):
        known[name] = make()
        storage.write_atomic(path, json.dumps(known).encode())
    return known[name]
