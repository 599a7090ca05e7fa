"""Proves what a worker does with a job: relative paths are the driver's, several ranks are one launch, and every way to
end is an outcome."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lacuna
from lacuna.tools.trials.job import Job, perform, placed
from lacuna.tools.trials.ledger import Ledger, slim
from tests.helpers.small_runs import ALONG, body, make_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("jobs")
    make_data(made, ALONG)
    return made


def job(folder: Path, name: str, **settings) -> Job:
    config = placed({**body(folder, name), **settings}, str(folder), name, "test")
    return Job(name, config, key="k")


def test_relative_paths_are_the_drivers(folder, tmp_path, monkeypatch):
    own = body(Path("."), "relative")
    monkeypatch.chdir(folder)
    made = Job("relative", placed(own, "runs", "relative", "test"), epochs=1, key="k")
    monkeypatch.chdir(tmp_path)
    assert perform(made).status == "paused"
    assert Path.cwd() == tmp_path
    assert (folder / "runs" / "relative" / "metrics.jsonl").exists()
    away = perform(replace(made, cwd="/not/there"))
    assert away.status == "refused"
    assert "/not/there: no such folder" in away.reason


def test_a_launcher_of_others_is_no_concern(folder, monkeypatch):
    """Ray's workers inherit the variables of the process that started Ray, which may be a rank of something."""
    if torch.distributed.is_initialized():
        pytest.skip("this process is in a group of its own by now")
    inherited = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    assert perform(replace(job(folder, "inherited"), epochs=1)).status == "paused"
    assert {name: os.environ[name] for name in inherited} == inherited


def test_ways_to_end(folder, tmp_path):
    late = replace(job(folder, "late"), deadline=time.time())
    assert perform(late).status == "stopped", "past its deadline it stops after a step, to go on"
    done = perform(replace(late, deadline=None), before=100.0)
    whole = lacuna.train(job(folder, "whole").config)
    assert (done.status, done.score, done.results["val"]) == ("finished", whole.best_score, whole.val)
    assert len(done.curve) == 4
    assert done.seconds > 100
    failed = perform(job(folder, "failed", method={"name": "bce"}))
    assert failed.status == "failed"
    assert "needs full labels" in failed.reason
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused = perform(Job("r", placed(body(folder, "r"), str(blocked), "r", "test"), key="k"))
    assert refused.status == "refused"
    assert str(blocked) in refused.reason


def test_what_is_dropped_and_what_a_ledger_keeps(folder, tmp_path):
    made = job(folder, "kept", train={"state_url": str(tmp_path / "states")})
    assert made.config.train.state_url == str(tmp_path / "states" / "kept")
    outcome = perform(replace(made, epochs=1))
    assert (tmp_path / "states" / "kept").exists()
    slim(made.config)
    assert not (tmp_path / "states" / "kept").exists()
    assert not (folder / "kept" / "checkpoints").exists()
    ledger = Ledger(str(tmp_path / "ledger"))
    ledger.write(made, outcome)
    again = Ledger(str(tmp_path / "ledger"))
    assert again.outcome(made) == outcome
    assert again.seconds("kept") == outcome.seconds
    with pytest.raises(lacuna.UserError, match="with other settings or data"):
        again.outcome(replace(made, key="other"))
    with again.held(), pytest.raises(lacuna.UserError, match="another process is at work"), \
            Ledger(str(tmp_path / "ledger")).held():
        pass


@pytest.mark.long
def test_two_ranks_are_one_launch(folder):
    made = replace(job(folder, "two"), ranks=2)
    assert perform(replace(made, epochs=2)).status == "paused"
    done = perform(made)
    assert (done.status, len(done.curve)) == ("finished", 4)
    alone = perform(job(folder, "one"))
    assert done.score == pytest.approx(alone.score, abs=0.5)
