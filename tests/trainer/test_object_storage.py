"""A whole run on s3:// (shards, state, checkpoints, logs) with failing requests and kills ends as on local disk."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from lacuna import state_store
from lacuna.basics import storage
from lacuna.tools.bench import s3_stand_in
from lacuna.tools.launches import timeless
from lacuna.tools.passes.trained import open_trained, read_weights
from lacuna.trainer.run_folder import _staging_of
from tests.helpers.launching import Launch, last_checkpoint, metrics, stored, weights
from tests.helpers.run_configs import en_scl_config
from tests.helpers.small_runs import body, make_data

FAULTS = {"500": 0.02, "503": 0.03, "truncate": 0.03, "lost": 0.02, "slow": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("object-storage")


def remote_config(root: str, shards: Path, name: str) -> dict:
    """The same run with everything on object storage."""
    body = en_scl_config(shards, name)
    for split in ("train", "val", "test"):
        body["data"][split]["url"] = f"{root}/data/{split}"
    return {**body, "run_folder": f"{root}/runs"}


def copy_shards(shards: Path, url: str) -> None:
    for path in sorted(shards.rglob("*")):
        if path.is_file():
            storage.upload(str(path), storage.join(url, str(path.relative_to(shards))))


def launch_on(body: dict, folder: Path, machine: str, ranks: int = 2, **environment: str) -> Launch:
    """A launch on a machine of its own: its staging folder is empty."""
    staging = str(folder / machine)
    launch = Launch(body, folder, ranks, f"train.staging={staging}", **environment)
    launch.folder = Path(_staging_of(f"{body['run_folder']}/{body['name']}", staging))
    return launch


def commits(url: str) -> list[str]:
    root = storage.join(url, "checkpoints")
    return [name for name in storage.list_names(root) if storage.exists(storage.join(root, name, "COMMIT.json"))]


def wait_for_commit(launch: Launch, url: str, step: int) -> None:
    launch.wait_until(lambda: (commits(url) or [""])[-1] >= f"step-{step:08d}", f"the checkpoint of step {step}")


def remote_weights(url: str) -> dict[str, torch.Tensor]:
    root = storage.join(url, "checkpoints", commits(url)[-1])
    commit = json.loads(storage.read_bytes(storage.join(root, "COMMIT.json")))
    return load(storage.read_bytes(storage.join(root, commit["prefix"], "model.safetensors")))


@pytest.mark.long
def test_train_kill_resume_and_evaluate_on_s3(s3, single_shards, folder, en_scl_reference):
    root = f"s3://bucket/{folder.name}"
    reference = en_scl_reference
    copy_shards(single_shards, f"{root}/data")
    body = remote_config(root, single_shards, "remote")
    url = f"{root}/runs/remote"
    s3.faults = dict(FAULTS)
    launch = launch_on(body, folder, "first")
    wait_for_commit(launch, url, 10)
    launch.signal_all(signal.SIGKILL)
    launch.wait()
    again = launch_on(body, folder, "second")
    again.ok()
    s3.faults = {}
    assert f"resuming from {url}/checkpoints/step-" in again.text()
    assert s3.counts.keys() == FAULTS.keys(), "every kind of failure was met"
    assert list((folder / "second").glob("*/*")) == [], "nothing is left on the machine"

    assert commits(url)[-1] == last_checkpoint(reference).name
    expected, found = weights(reference), remote_weights(url)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    chosen, local = read_weights(open_trained(url)), read_weights(open_trained(str(reference)))
    assert all(torch.equal(chosen[name], local[name]) for name in local), "what `lacuna eval` would use"
    for name, values in stored(reference).items():
        np.testing.assert_array_equal(stored_at(f"{url}/state", commits(url)[-1])[name], values, name)
    lines = [json.loads(line) for line in storage.read_bytes(f"{url}/metrics.jsonl").splitlines()]
    assert timeless(lines) == timeless(metrics(reference))
    assert storage.read_bytes(f"{url}/results.json") == (reference / "results.json").read_bytes()
    assert storage.list_names(f"{url}/tensorboard")
    assert b"resuming from" in storage.read_bytes(f"{url}/log.txt")
    assert_no_secret(s3, url, [launch.text(), again.text()])


def stored_at(url: str, snapshot: str) -> dict[str, np.ndarray]:
    store = state_store.open(url)
    reader = store.reader(snapshot)
    return {name: np.concatenate([reader.read_shard(name, s) for s in range(store.schema.shards)])
            for name in store.schema.fields}


def assert_no_secret(s3, url: str, texts: list[str]) -> None:
    """Neither in what was printed nor in any object of the run."""
    import os

    from fsspec.core import url_to_fs

    secrets = [os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_ACCESS_KEY_ID"]]
    fs, path = url_to_fs(url)
    for name in fs.find(path):
        data = fs.cat_file(name)
        assert not any(secret.encode() in data for secret in secrets), name
    assert not any(secret in text for secret in secrets for text in texts)


def test_only_one_creates_an_object(s3, folder):
    url = f"s3://bucket/{folder.name}-exclusive/commit"
    assert storage.create_exclusive(url, b"first")
    assert not storage.create_exclusive(url, b"second")
    assert storage.read_bytes(url) == b"first"
    s3.faults = {"lost": 0.5}
    for number in range(10):  # an answer that is lost must not look like another's success
        assert storage.create_exclusive(f"{url}-{number}", b"mine")


def test_wrong_credentials_are_said(s3, single_shards, folder):
    root = f"s3://bucket/{folder.name}-refused"
    body = remote_config(root, single_shards, "refused")
    launch = launch_on(body, folder, "third", 1, AWS_SECRET_ACCESS_KEY="not-the-secret")
    assert launch.wait() == 2, launch.text()
    assert f"lacuna: {root}/data/train/index.json: the storage refuses access" in launch.text()
    assert "AWS_SECRET_ACCESS_KEY" in launch.text()
    assert "not-the-secret" not in launch.text()
    assert "Traceback" not in launch.text()


def test_an_outage_is_said_while_it_lasts_and_without_a_librarys_traceback(tmp_path):
    """A server that answers 503 to everything: the run says so, goes on when it is over, and stops when it is asked."""
    make_data(tmp_path)
    process, port = s3_stand_in.start("lacuna.tools.bench.failing_s3")
    try:
        config = body(tmp_path, "run")
        config["phases"][0]["epochs"] = 5000
        launch = Launch({**config, "run_folder": "s3://bucket/runs"}, tmp_path, 1,
                        f"train.staging={tmp_path / 'staging'}", **s3_stand_in.variables(port))
        try:
            launch.wait_until(lambda: "epoch 2/" in launch.text(), "it trains")
            process.send_signal(signal.SIGUSR1)
            launch.wait_until(lambda: "trying again" in launch.text() or "still waiting" in launch.text(),
                              "the outage was said")
            process.send_signal(signal.SIGUSR2)
            lines = launch.text().count(" loss ")
            launch.wait_until(lambda: launch.text().count(" loss ") > lines + 6, "it goes on")
            launch.signal_all(signal.SIGTERM)
            assert launch.wait() == 0, launch.text()[-3000:]
        finally:
            launch.signal_all(signal.SIGKILL)
        assert "stopped as asked" in launch.text()
        for words in ("Traceback", "never retrieved", "botocore.exceptions"):
            assert words not in launch.text(), launch.text()[-5000:]
    finally:
        process.kill()
        process.wait(60)
