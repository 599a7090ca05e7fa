"""Every method trains on two ranks in one launch; what was left or killed inside an epoch resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from lacuna import state_store
from lacuna.trainer.methods import METHODS
from lacuna.trainer.methods.base import Method
from tests.helpers.launching import Launch, assert_equal_weights, last_checkpoint, losses, stored
from tests.helpers.method_runs import STEPS, config, make_data

KILLED = "em_apl"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    make_data(folder)
    return folder


def remembers(kind: type[Method]) -> bool:
    """Whether a resume has more to bring back than the weights."""
    return (kind.fields is not Method.fields or kind.state is not Method.state or kind.module is not Method.module)


@pytest.fixture(scope="module")
def folder(data) -> Path:
    """Runs are left after the fifth step and go on from the fourth; the last is killed with the launch, and resumed by
    another launch."""
    jobs = []
    for name, kind in METHODS.items():
        jobs.append({"config": config(data, name)})
        if remembers(kind):
            jobs += [{"config": config(data, name, "-left"), "leave": 5}, {"config": config(data, name, "-left")}]
    killed = {"config": config(data, KILLED, "-killed")}
    assert Launch.many([*jobs, {**killed, "kill": 5}], "every", data, 2).wait(1800) != 0
    Launch.many([killed], "again", data, 2).ok()
    return data


@pytest.mark.parametrize("name", METHODS)
def test_trains_and_resumes(folder, name):
    found = losses(folder / name)
    assert len(found) == STEPS
    assert np.isfinite(found).all()
    if name == KILLED:
        assert_equal_runs(folder / name, folder / f"{name}-killed")
    if remembers(METHODS[name]):
        assert_equal_runs(folder / name, folder / f"{name}-left")


def assert_equal_runs(one: Path, two: Path) -> None:
    assert losses(one) == losses(two)
    assert_equal_weights(one, two)
    a, b = (load_file(last_checkpoint(run) / "method.safetensors") for run in (one, two))
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key].numpy(), b[key].numpy(), key)
    if (one / "state").exists():
        first, second = written(one), written(two)
        assert first.keys() == second.keys()
        for place in first:
            np.testing.assert_array_equal(first[place], second[place], str(place))


def written(run: Path) -> dict[tuple[str, int], np.ndarray]:
    """(field, shard) → stored rows; chunks that were never written have no rows of their own (tables, neighbours)."""
    store = state_store.open(str(run / "state"))
    reader = store.reader(last_checkpoint(run).name)
    return {(name, shard): reader.read_shard(name, shard) for name, shards in reader.refs.items() for shard in shards}


def test_methods_did_something(folder):
    """What passes, tables and queues are for has happened in these runs."""
    assert stored(folder / "ll_cp")["corrected"].any()
    assert stored(folder / "mime")["corrected"].any()
    assert (stored(folder / "em_apl")["score"] < 2**15 - 1024).any(), "no pseudo-negatives"
    assert stored(folder / "scpnet")["selected"].any()
    state = {name: load_file(last_checkpoint(folder / name) / "method.safetensors")
             for name in ("crisp", "lac", "ignore", "ccd", "scob")}
    assert (state["crisp"]["priors"] > 0).any()
    assert (state["lac"]["classes"] >= 0).any()
    assert state["ignore"]["gap"] > 0
    assert (state["ccd"]["bias"] != 1).any()
    assert state["scob"]["surest"].any()
    assert (state["scob"]["correlation"] > 0).all()
