"""Launches that go wrong end soon, non-zero, and say which rank, file or key is at fault."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from lacuna.basics.places import RUN_SCRIPT
from lacuna.data_pipelines.index import ShardIndex
from lacuna.tools.launches import free_port
from lacuna.trainer.run import main
from tests.helpers.launching import Launch, environment
from tests.helpers.run_configs import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


def long_config(shards, name):
    body = config(shards, name)
    body["phases"] = [{**body["phases"][1], "epochs": 500}]
    return body


@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.long)])  # rank 0 keeps the group's store
def test_a_frozen_rank_is_named_after_the_timeout(digit_shards, folder, number):
    launch = Launch(long_config(digit_shards, f"frozen-{number}"), folder, 2, "train.timeout_seconds=20",
                    "data.val=null")
    launch.wait_for_step(3)
    victim = launch.ranks()[number]
    os.kill(victim, signal.SIGSTOP)
    try:
        # The launcher ends the others politely first, which a frozen process cannot hear: let it go on then.
        launch.wait_until(lambda: f"Waiting for: rank {number} (" in launch.text(), f"rank {number} was named")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    assert "made no progress for 20 s (train.timeout_seconds)" in launch.text()
    assert launch.wait() != 0


@pytest.mark.parametrize(("number", "rank", "words"), [
    (signal.SIGILL, 1, "died by SIGILL (signal 4, illegal instruction: the CPU announces"),
    pytest.param(signal.SIGKILL, 0, "died by SIGKILL (signal 9, killed: by the system when memory ran out",
                 marks=pytest.mark.long)])
def test_a_dead_rank_ends_the_launch_and_is_named(digit_shards, folder, number, rank, words):
    launch = Launch(long_config(digit_shards, f"dead-{rank}"), folder, 2, "data.val=null", launcher=True)
    launch.wait_for_step(3)
    pid = launch.ranks()[rank]
    os.kill(pid, number)
    assert launch.wait() != 0
    assert f"lacuna: rank {rank} (process {pid}) {words}" in launch.text(), launch.text()[-3000:]
    assert f"rank {1 - rank} failed" in launch.text()


def test_sigterm_to_the_ranks_of_a_launch_checkpoints_and_exits_0(digit_shards, folder):
    launch = Launch(long_config(digit_shards, "preempted"), folder, 2, "data.val=null",
                    "train.checkpoint_every=1000st")
    launch.wait_for_step(3)
    os.kill(launch.ranks()[1], signal.SIGTERM)  # one is enough: ranks agree on stopping
    assert launch.wait() == 0, launch.text()[-3000:]
    assert list((launch.folder / "checkpoints").glob("*/COMMIT.json"))


def test_sigterm_to_deepspeeds_launcher_alone_ends_the_run_with_a_checkpoint(digit_shards, folder):
    """It dies and tells nobody: the ranks notice, and none trains on as an orphan."""
    launch = Launch(long_config(digit_shards, "orphans"), folder, 2, "data.val=null", "train.checkpoint_every=1000st",
                    launcher=True)
    launch.wait_for_step(3)
    ranks = launch.ranks()
    assert len(ranks) == 2
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == -signal.SIGTERM
    end = time.monotonic() + 120
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        assert time.monotonic() < end, launch.text()[-3000:]
        time.sleep(0.2)
    assert f"(process {launch.process.pid}) is gone: stopping with a checkpoint" in launch.text()
    assert "stopped as asked; the same command resumes" in launch.text()
    assert list((launch.folder / "checkpoints").glob("*/COMMIT.json"))


class Alone:
    """One rank of a launch whose launcher does nothing for it."""

    def __init__(self, body: dict, folder, rank: int, port: int, *overrides: str):
        path = folder / f"{body['name']}-{rank}.yaml"
        path.write_text(yaml.safe_dump({"run_folder": str(folder), **body}))
        self.output = folder / f"{body['name']}-{rank}.out"
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port)}
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen([sys.executable, RUN_SCRIPT, "--config", str(path), *overrides], stdout=out,
                                            stderr=out, env={**environment(), **group})

    def text(self) -> str:
        return self.output.read_text()


def test_a_rank_whose_peer_never_comes_gives_up_in_one_sentence(digit_shards, folder):
    body, port = long_config(digit_shards, "alone"), free_port()
    ranks = [Alone({**body, "name": f"alone-{rank}"}, folder, rank, port if rank == 0 else free_port(),
                   "train.timeout_seconds=5") for rank in (0, 1)]
    for number, rank in enumerate(ranks):
        assert rank.process.wait(600) == 75, rank.text()[-3000:]
        assert f"rank {number} did not meet all 2 ranks of this launch at 127.0.0.1:" in rank.text()
        assert "within 5 s (train.timeout_seconds)" in rank.text()
        assert "Traceback" not in rank.text()


def test_a_rank_does_not_outlive_a_peer_that_was_killed_early(digit_shards, folder):
    """Killed while models are built: the other one ends by itself, without a launcher that would end it."""
    body, port = long_config(digit_shards, "early"), free_port()
    ranks = [Alone(body, folder, rank, port, "train.timeout_seconds=300") for rank in (0, 1)]
    try:
        end = time.monotonic() + 300
        while not (folder / "early" / "log.txt").exists():
            assert time.monotonic() < end
            assert ranks[0].process.poll() is None, ranks[0].text()[-3000:]
            time.sleep(0.01)
        ranks[1].process.kill()
        ranks[1].process.wait()
        assert ranks[0].process.wait(120) in (1, 75)
        assert "Traceback" not in ranks[0].text()
        assert "rank 1" in ranks[0].text() or "the connection to another rank is lost" in ranks[0].text()
    finally:
        for rank in ranks:
            rank.process.kill()


@pytest.fixture
def damaged(digit_shards, tmp_path):
    """A copy of the training set in which three pictures are garbage."""
    shutil.copytree(digit_shards, tmp_path / "shards")
    index = ShardIndex.load(str(tmp_path / "shards" / "train"))
    for shard, row in ((0, 3), (2, 0), (5, 7)):
        members = index.members(shard)
        with open(index.shard_url(shard), "r+b") as tar:
            tar.seek(int(members.offsets[row]))
            tar.write(b"\0" * int(members.sizes[row]))
    return tmp_path


def test_corrupt_samples_are_listed_up_to_the_allowed_fraction(damaged):
    body = config(damaged / "shards", "damaged")
    body["phases"] = body["phases"][:1]
    launch = Launch(body, damaged, 1)
    assert launch.wait() == 2
    assert "could not be decoded, more than data.max_bad_fraction = 0.001 allows" in launch.text()
    launch = Launch({**body, "name": "tolerant"}, damaged, 1, "data.max_bad_fraction=0.05")
    launch.ok()
    listed = [json.loads(line) for line in (launch.folder / "bad_samples.jsonl").read_text().splitlines()]
    assert len(listed) == 3
    assert {bad["row"] for bad in listed} == {3, 0, 7}
    assert all(bad["key"].startswith("scene-") and bad["reason"] for bad in listed)
    # What remains is a whole run; with other settings its checkpoints are refused, not mixed up.
    launch = Launch({**body, "name": "tolerant"}, damaged, 1, "data.max_bad_fraction=0.05", "seed=5")
    assert launch.wait() == 2
    assert "made with another config" in launch.text()


def run_main(capsys, *arguments):
    code = main(list(arguments))
    return code, capsys.readouterr().err


def test_config_mistakes_are_named_before_anything_starts(capsys, tmp_path):
    good = tmp_path / "good.yaml"
    good.write_text("name: x\ndata: {train: {url: /nowhere}}\nphases: [{name: a, epochs: 1, batch: 8, lr: 0.1}]\n")
    cases = {
        ("train.precison=bf16",): "unknown key 'train.precison'; did you mean 'precision'?",
        ("phases.0.lrr=1",): "unknown key 'phases.0.lrr'; did you mean 'lr'?",
        ("train.keep=many",): "train.keep = 'many'",
        ("train.checkpoint_every=5min",): "duration '5min'",
        ("phases.3.lr=1",): "use an index 0..0",
        ("model=",): "model",
        ("justaword",): "write section.key=value",
    }
    for overrides, message in cases.items():
        code, text = run_main(capsys, "--config", str(good), *overrides)
        assert code == 2, overrides
        assert message in text
    code, text = run_main(capsys, "--config", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "no such file" in text
