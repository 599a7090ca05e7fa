"""Proves that a run given more epochs ends as one that had them from the start, and what is said when it cannot."""

from __future__ import annotations

import inspect

import pytest
import yaml

from lacuna.basics.errors import UserError
from lacuna.trainer.methods import METHODS, example
from tests.helpers import small_runs
from tests.helpers.small_runs import EPOCHS, STEPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("extending")
    small_runs.make_data(made)
    return made


@pytest.fixture(scope="module")
def trainer():
    return small_runs.Trainer()


def body(folder, name: str, epochs: int, **phase) -> dict:
    made = small_runs.body(folder, name)
    made["phases"][0] |= {"epochs": epochs, **phase}
    return made


def test_a_finished_run_goes_on_to_more_epochs(folder, trainer):
    trainer.train(body(folder, "grown", 2, warmup="5st"))
    trainer.train(body(folder, "grown", EPOCHS, warmup="5st"))
    trainer.train(body(folder, "whole", EPOCHS, warmup="5st"))
    assert small_runs.outcome(folder / "grown") == small_runs.outcome(folder / "whole")
    assert yaml.safe_load((folder / "grown" / "config.yaml").read_text())["phases"][0]["epochs"] == EPOCHS


def test_a_launch_that_dies_before_its_first_checkpoint_changes_nothing(folder, trainer):
    trainer.train(body(folder, "died", 2))
    trainer.train(body(folder, "died", EPOCHS), leave=STEPS // 2 + 1)
    trainer.train(body(folder, "died", EPOCHS))
    trainer.train(body(folder, "calm", EPOCHS))
    assert small_runs.outcome(folder / "died") == small_runs.outcome(folder / "calm")


def test_what_cannot_be_extended_says_how_to_go_on(folder, trainer):
    for name, phase, words in (("cosine", {"schedule": "cosine"}, "schedule = 'cosine' spans the whole phase"),
                               ("part", {"warmup": "10%"}, "warmup = '10%' is a part of the phase")):
        trainer.train(body(folder, name, 2, **phase))
        with pytest.raises(UserError, match=r"phases\.0\.epochs: 2 → 3") as refused:
            trainer.train(body(folder, name, 3, **phase))
        assert words in str(refused.value)
        weights = str(refused.value).rpartition("model.weights=")[2]
        assert (folder / name / "checkpoints").as_posix() in weights
    with pytest.raises(UserError, match=r"phases.0.epochs: 2 → 1: 2 epochs of this phase have begun. Give 2 or more"):
        trainer.train(body(folder, "part", 1, warmup="10%"))
    other = body(folder, "part", 2, warmup="10%") | {"seed": 5}
    with pytest.raises(UserError, match="made with another config"):
        trainer.train(other)


def test_a_method_that_counts_the_epochs_is_refused(folder, trainer):
    made = body(folder, "gr", 2) | {"method": {"name": "gr"}}
    trainer.train(made)
    made["phases"][0]["epochs"] = 3
    with pytest.raises(UserError, match="method 'gr' changes over the epochs of a phase"):
        trainer.train(made)


@pytest.mark.parametrize("name", METHODS)
def test_methods_say_whether_they_count_the_epochs(name):
    own = "".join(inspect.getsource(part) for kind in METHODS[name].__mro__ for part in vars(kind).values()
                  if inspect.isfunction(part) and not kind.__module__.endswith(".base"))
    assert example(name, 10).needs().epochs == ("step.epochs" in own or "start.epochs" in own)


def test_what_a_launch_without_a_checkpoint_left_does_not_hinder_the_next(folder, trainer):
    """Other fields, and a snapshot whose checkpoint was never committed."""
    trainer.train(body(folder, "left", EPOCHS), leave=1)
    other = body(folder, "left", EPOCHS) | {"method": {"name": "role", "lr": 0.03}}
    trainer.train(other, leave=4)
    for commit in (folder / "left" / "checkpoints").glob("*/COMMIT.json"):
        commit.unlink()
    for entry in (folder / "left" / "state" / "log").glob("*.json"):
        if '\\"kind\\": \\"checkpoint\\"' in entry.read_text():
            entry.unlink()
    trainer.train(body(folder, "left", EPOCHS))
    trainer.train(body(folder, "never", EPOCHS))
    left, never = small_runs.outcome(folder / "left"), small_runs.outcome(folder / "never")
    assert left == never
