"""Proves that heads with queries learn the same on one and on two ranks and resume bit for bit, with LAC on top too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.launching import Launch, assert_equal_weights, losses
from tests.helpers.method_runs import STEPS, config, make_data

RUNS = {"q2l": ("lac", "query2label", 0.0), "dropped": ("lac", "query2label", 0.1),
        "mld": ("en_scl", "ml_decoder", 0.0)}


def job(data, name: str, suffix: str = "") -> dict:
    method, head, dropout = RUNS[name]
    found = config(data, method, suffix)
    decoder = {"width": 16, "feedforward": 24, "heads": 2, "dropout": dropout}
    return {**found, "name": name + suffix, "model": {**found["model"], "head": head, "decoder": decoder}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("queries")
    make_data(data)
    two = [{"config": job(data, name)} for name in RUNS]
    two += [{"config": job(data, "dropped", "-left"), "leave": 5}, {"config": job(data, "dropped", "-left")}]
    Launch.many(two, "two", data, 2).ok()
    Launch.many([{"config": job(data, name, "-alone")} for name in ("q2l", "mld")], "one", data, 1).ok()
    return data


def test_resumes_bit_for_bit(folder):
    assert len(losses(folder / "dropped")) == STEPS
    assert losses(folder / "dropped") == losses(folder / "dropped-left")
    assert_equal_weights(folder / "dropped", folder / "dropped-left")


@pytest.mark.parametrize("name", ["q2l", "mld"])
def test_one_rank_learns_what_two_learn(folder, name):
    np.testing.assert_allclose(losses(folder / name), losses(folder / f"{name}-alone"), rtol=1e-4)
