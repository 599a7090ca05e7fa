"""Per-sample state of ROLE and EN+SCL: killed and resumed = never killed, and two ranks = one rank."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from lacuna.tools.launches import timeless
from tests.helpers.launching import Launch, assert_equal_weights, losses, metrics, stored
from tests.helpers.run_configs import METHODS, method_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("state-runs")


# ROLE is killed and resumed in every `make test` with its other estimators (test_many_runs.py).
@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.long] * (m == "role")) for m in METHODS])
def test_kill_resume_and_world_size(single_shards, folder, method):
    reference = Launch(method_config(single_shards, f"{method}-reference", method), folder, 2)
    reference.ok()

    body = method_config(single_shards, f"{method}-killed", method)
    for step in (9, 27):
        launch = Launch(body, folder, 2)
        launch.wait_for_step(step)
        launch.signal_all(signal.SIGKILL)
        launch.wait()
    launch = Launch(body, folder, 2)
    launch.ok()
    assert "resuming from" in launch.text()
    assert_equal_weights(reference.folder, launch.folder)
    assert timeless(metrics(launch.folder)) == timeless(metrics(reference.folder))
    expected, found = stored(reference.folder), stored(launch.folder)
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], name)


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_and_two_ranks_agree_with_sgd(single_shards, folder, method):
    runs = []
    for ranks in (1, 2):
        body = method_config(single_shards, f"{method}-sgd-{ranks}", method, optimizer="sgd", lr=0.02)
        body["phases"] = [{**body["phases"][1], "epochs": 4, "schedule": "constant"}]
        body["method"] = {**body["method"], **({"start_phase": 0} if method == "en_scl" else {})}
        launch = Launch(body, folder, ranks, "data.val=null", "data.test=null")
        launch.ok()
        runs.append(launch.folder)
    assert len(losses(runs[0])) >= 50
    np.testing.assert_allclose(losses(runs[0]), losses(runs[1]), atol=1e-5)
    one, two = stored(runs[0]), stored(runs[1])
    for name in one:
        a, b = one[name].astype(np.float64), two[name].astype(np.float64)
        if one[name].dtype == np.uint8:
            assert np.abs(a - b).max() <= 1
            assert (a != b).mean() <= 1e-3
        else:
            np.testing.assert_allclose(a, b, atol=1e-3)
