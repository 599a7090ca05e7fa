"""Damaged configs, tables and commits end in errors that name what is wrong; secrets in them are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from lacuna.basics.errors import UserError
from lacuna.trainer.checkpoints.commits import signed
from lacuna.trainer.checkpoints.files import CheckpointFiles, facts_of
from lacuna.trainer.config.files import load_config
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.run_folder import RunFolder
from lacuna.trainer.world import World
from tests.helpers.fuzzing import damaged_bytes, damaged_json, fuzz_all

CONFIG = b"""name: x
data:
  train: {url: shards/train, labels: single}
  val: {url: shards/val}
  augment: {crop: random_resized, scale: [0.6, 1.0]}
method: {name: en_scl, gamma: 0.1}
phases:
  - {name: warm-up, epochs: 4, batch: 32, lr: 3.0e-3}
  - {name: train, epochs: 5, batch: 32, lr: 3.0e-3, schedule: cosine, warmup: 5%}
train: {log_every: 50, checkpoint_every: 500st}
"""
TABLE = {"about": "A table.", "source": "nobody", "base": ["base.yaml"], "shared": {"a": [1]},
         "defaults": {"train": {"keep": 2}, "method": {"name": "an"}},
         "rows": {"a": {"reported": 1.5, "note": "b", "data": {"train": {"url": "a"}}, "phases": [
             {"name": "p", "epochs": 1, "batch": 8, "lr": 0.1}]}, "b": {"base": "base.yaml", "reported": {"mAP": 1}}}}
BODY = {"name": "x", "data": {"train": {"url": "a"}, "augment": {"scale": [0.5, 1]}}, "method": {"name": "an"},
        "phases": [{"name": "p", "epochs": 1, "batch": 8, "lr": 0.1, "warmup": "5%"}], "train": {"keep": 2}}


def files_of(folder: Path) -> CheckpointFiles:
    world = World(torch.device("cpu"))
    step = folder / "checkpoints" / "step-00000001"
    (step / "engine").mkdir(parents=True)
    (step / "model.safetensors").write_bytes(b"weights")
    (step / "engine" / "states.pt").write_bytes(b"optimizer")
    files = {name: facts_of(str(step / name)) for name in ("model.safetensors", "engine/states.pt")}
    (step / "COMMIT.json").write_bytes(signed({"files": files, "world": 1, "zero_stage": 0, "fingerprints": {},
                                               "position": {}}))
    return CheckpointFiles(RunFolder(str(folder), world), world)


def resigned(data: bytes) -> bytes:
    """With a checksum that fits: damage has none, but a stranger can make one."""
    try:
        body = json.loads(data)
        body.pop("sha256", None)
        return signed(body)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


def targets(tmp_path: Path) -> dict:
    path = tmp_path / "config.yaml"
    files = files_of(tmp_path / "run")
    commit = tmp_path / "run" / "checkpoints" / "step-00000001" / "COMMIT.json"

    def config(data: bytes) -> None:
        path.write_bytes(data)
        load_config(str(path), []).fingerprint()

    def committed(data: bytes) -> None:
        commit.write_bytes(data)
        files.problem("step-00000001")

    def table(data: bytes) -> None:
        path.write_bytes(data)
        load_config(f"{path}:a", []).fingerprint()

    (tmp_path / "base.yaml").write_bytes(CONFIG)
    return {
        "table": (damaged_bytes(yaml.safe_dump(TABLE).encode()), table),
        "table values": (damaged_json(json.dumps(TABLE).encode()), table),
        "config": (damaged_bytes(CONFIG), config),
        "config values": (damaged_json(json.dumps(BODY).encode()), config),
        "commit": (damaged_json(commit.read_bytes()), committed),
        "signed commit": (damaged_json(commit.read_bytes()), lambda data: committed(resigned(data))),
    }


ALLOWED = (UserError,)


def test_damaged_configs_tables_and_commits(tmp_path):
    fuzz_all(targets(tmp_path), ALLOWED)


def test_a_checkpoint_counts_only_with_exactly_the_committed_files(tmp_path):
    files = files_of(tmp_path)
    assert files.problem("step-00000001") is None
    step = tmp_path / "checkpoints" / "step-00000001"
    (step / "engine" / "foreign.pt").write_bytes(b"would be unpickled")
    assert files.problem("step-00000001") == "engine/foreign.pt is not in COMMIT.json"
    (step / "engine" / "foreign.pt").unlink()
    (step / "engine" / "states.pt").write_bytes(b"0ptimizer")
    assert files.problem("step-00000001") == "engine/states.pt is damaged"
    body = json.loads((step / "COMMIT.json").read_text())
    body["files"]["../../outside"] = body["files"]["model.safetensors"]
    (step / "COMMIT.json").write_bytes(resigned(json.dumps(body).encode()))
    assert files.problem("step-00000001") == "COMMIT.json is damaged: file name '../../outside'"
    (step / "COMMIT.json").write_text(json.dumps({**body, "world": 2}))
    assert "its checksum does not fit" in (files.problem("step-00000001") or "")


def test_secrets_in_urls_are_refused_without_being_repeated():
    for url in ("https://user:hunter2@host/shards", "s3://AKIAX:hunter2@bucket/shards",
                "https://host/x?X-Amz-Signature=hunter2", "https://host/x?a=b&token=hunter2"):
        with pytest.raises(UserError, match=r"data\.train\.url") as caught:
            parse_config({**BODY, "data": {"train": {"url": url}}}, "x.yaml")
        assert "hunter2" not in str(caught.value)
    parse_config({**BODY, "data": {"train": {"url": "s3://bucket/shards@2024/a?b"}}}, "x.yaml")


def test_a_stale_launch_can_neither_commit_nor_delete(tmp_path):
    old, new = files_of(tmp_path), CheckpointFiles(RunFolder(str(tmp_path), World(torch.device("cpu"))),
                                                   World(torch.device("cpu")))
    old.begin_launch()
    old.check_current()
    new.begin_launch()
    with pytest.raises(UserError, match="launch 2 of this run has begun, so launch 1 ends here"):
        old.commit("step-00000002", {"files": {}})
    with pytest.raises(UserError, match="launch 2 of this run has begun"):
        old.begin("step-00000001")
    assert old.committed("step-00000001")
    new.check_current()
