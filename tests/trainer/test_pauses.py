"""Proves that a run paused after any epoch (`train.stop_after`) and let go on is the run that never paused, and that a
finished run that is given a test set afterwards only tests."""

from __future__ import annotations

import copy

import pytest
import torch

import lacuna
from lacuna.tools.launches import timeless
from lacuna.trainer.config.sections import parse_config
from tests.helpers.launching import assert_equal_weights, metrics
from tests.helpers.small_runs import ALONG, body, make_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("pauses")
    make_data(made, ALONG)
    return made


def config(folder, name: str, test: bool = True, **train):
    made = copy.deepcopy(body(folder, name))
    first = made["phases"][0]
    made["phases"] = [{**first, "name": "a", "epochs": 2}, {**first, "name": "b", "epochs": 2, "lr": 0.01}]
    made["train"] |= train
    if test:
        made["data"]["test"] = {"url": str(folder / "test")}
    return parse_config(made, "test")


def test_paused_runs_are_whole_runs(folder):
    whole = lacuna.train(config(folder, "whole"))
    for until in (1, 1, 2, 3, 4):  # twice the same: a job that was done, but not taken note of
        part = lacuna.train(config(folder, "parts", test=False, stop_after=until))
        assert part.stopped == (until < 4)
        assert len(metrics(folder / "parts", "epoch")) == until
    assert part.val == whole.val
    assert part.test == {}
    tested = lacuna.train(config(folder, "parts"))
    assert (tested.val, tested.test, tested.best_step) == (whole.val, whole.test, whole.best_step)
    assert_equal_weights(folder / "whole", folder / "parts")
    assert timeless(metrics(folder / "whole")) == timeless(metrics(folder / "parts"))
