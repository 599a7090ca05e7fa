"""Proves that heads with transformers learn the same on one and on two ranks and resume bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.launching import Launch, assert_equal_weights, losses
from tests.helpers.method_runs import STEPS, config, make_data

RUNS = {"q2l": ("lac", "query2label", 0.0), "dropped": ("lac", "query2label", 0.1),
        "mld": ("en_scl", "ml_decoder", 0.0), "drawn": ("mime", "variational", 0.0),
        "masked": ("scob", "masked_transformer", 0.0)}
LEFT, ALONE = ("dropped", "drawn", "masked"), ("q2l", "mld", "drawn", "masked")


def job(data, name: str, suffix: str = "") -> dict:
    method, head, dropout = RUNS[name]
    found = config(data, method, suffix)
    decoder = {"width": 16, "feedforward": 24, "heads": 2, "dropout": dropout, "earlier": "4"}
    return {**found, "name": name + suffix, "model": {**found["model"], "head": head, "decoder": decoder}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("queries")
    make_data(data)
    two = [{"config": job(data, name)} for name in RUNS]
    for name in LEFT:
        two += [{"config": job(data, name, "-left"), "leave": 5}, {"config": job(data, name, "-left")}]
    Launch.many(two, "two", data, 2).ok()
    Launch.many([{"config": job(data, name, "-alone")} for name in ALONE], "one", data, 1).ok()
    return data


@pytest.mark.parametrize("name", LEFT)
def test_resumes_bit_for_bit(folder, name):
    assert len(losses(folder / name)) == STEPS
    assert losses(folder / name) == losses(folder / f"{name}-left")
    assert_equal_weights(folder / name, folder / f"{name}-left")


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_learns_what_two_learn(folder, name):
    np.testing.assert_allclose(losses(folder / name), losses(folder / f"{name}-alone"), rtol=1e-4)
