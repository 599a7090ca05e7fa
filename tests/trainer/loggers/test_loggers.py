"""Proves that loggers are one setting: absent packages are named, services that fail do not end training."""

from __future__ import annotations

import importlib.util
import logging
import threading

import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.basics.fence import Fence, Hold
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.loggers import check_loggers, identity
from lacuna.trainer.loggers.sender import Sender
from lacuna.trainer.run_folder import RunFolder
from lacuna.trainer.run_log import RunLog
from lacuna.trainer.world import World


def config(folder, *loggers: str):
    return parse_config({"name": "run", "run_folder": str(folder), "data": {"train": {"url": "a"}},
                         "method": {"name": "an"}, "train": {"loggers": loggers},
                         "phases": [{"name": "p", "epochs": 1, "batch": 8, "lr": 0.1}]}, "test")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_absent_package_is_named_with_its_extra(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=rf"train.loggers = .*pip install 'lacuna-trainer\[{name}\]'"):
        check_loggers(config(tmp_path, "tensorboard", name))
    assert not list(tmp_path.iterdir())


def test_unknown_loggers_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"train\.loggers\.0 = 'comet'.*wandb"):
        config(tmp_path, "comet")


def test_loggers_are_no_part_of_a_runs_identity(tmp_path):
    assert config(tmp_path, "wandb").fingerprint() == config(tmp_path).fingerprint()


def test_without_loggers_only_metrics_are_written(tmp_path):
    body = config(tmp_path)
    log = RunLog(body, RunFolder(body.folder, World(torch.device("cpu"))), True)
    fence = Fence(str(tmp_path / "run" / "checkpoints" / "log"))
    log.rewind(0, Hold(fence, fence.begin()))
    log.write("train", 1, {"loss": 1.0, "phase": "p"})
    log.close()
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_the_name_at_a_service_is_made_once(tmp_path):
    folder = RunFolder(str(tmp_path), World(torch.device("cpu")))
    assert [identity(folder, "wandb", lambda name=name: name) for name in ("a", "b")] == ["a", "a"]
    assert identity(folder, "mlflow", lambda: "c") == "c"
    assert identity(folder, "wandb", lambda: "d") == "a"
    (tmp_path / "loggers.json").write_text("{")
    with pytest.raises(UserError, match=r"loggers\.json: damaged"):
        identity(folder, "wandb", lambda: "e")


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def warnings():
    handler = Warnings()
    logging.getLogger("lacuna").addHandler(handler)
    yield handler.texts
    logging.getLogger("lacuna").removeHandler(handler)


def test_a_service_that_fails_gets_no_more_and_is_named_once(warnings):
    sender, done = Sender("Service"), []

    def refuse() -> None:
        raise ConnectionError("gone")

    for job in (lambda: done.append(1), refuse, lambda: done.append(2), refuse):
        sender.put(job)
    sender.close()
    assert done == [1]
    assert warnings == ["Service gets no more lines of this launch (metrics.jsonl has all): ConnectionError: gone"]


def test_a_service_that_hangs_does_not_keep_a_launch_alive(warnings):
    sender, end = Sender("Service"), threading.Event()
    sender.put(end.wait)
    sender.close(seconds=0.05)
    assert "did not answer within 0 s" in warnings[0]
    end.set()
