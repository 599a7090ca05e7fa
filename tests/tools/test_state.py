"""Proves that `lacuna state` lists, checks, exports, imports, reshards and migrates a store from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lacuna import state_store
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store import Constant, Field
from lacuna.tools.cli import main
from lacuna.trainer.sample_state import SampleState

FIELDS = [Field("ema", (10,), "uint8", Constant(0.2), range=(0, 1), histogram=True), Field("visits", (), "int32")]


@pytest.fixture
def trained(digit_shards, tmp_path) -> tuple[str, ShardIndex]:
    """A store over the digit scenes in which every row holds a number made from its key."""
    index = ShardIndex.load(str(digit_shards / "train"))
    store = state_store.create(str(tmp_path / "state"), index.counts, index.fingerprint, FIELDS)
    with store.session(store.begin_launch(), budget=10**7) as session:
        for shard in range(len(index.shards)):
            session.lease(shard)
            codes = np.array([number(key) for key in index.members(shard).keys])
            where = np.full(len(codes), shard), np.arange(len(codes))
            session.scatter("visits", *where, codes.astype(np.int32))
            session.scatter("ema", *where, np.repeat(codes[:, None] % 256, 10, axis=1).astype(np.uint8))
            session.release(shard)
        session.finish()
        session.snapshot("end", {"epoch": 1})
    return store.url, index


def number(key: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(key)) % 10_007


def test_listing_and_checking(trained, capsys):
    """snapshots and verify print what is there; damage changes the exit code and names the chunk."""
    url, _ = trained
    assert main(["state", "snapshots", url]) == 0
    assert "end" in capsys.readouterr().out
    assert main(["state", "snapshots", url, "--json"]) == 0
    assert [e["name"] for e in json.loads(capsys.readouterr().out)["snapshots"]] == ["end"]
    assert main(["state", "verify", url]) == 0
    assert "no problems" in capsys.readouterr().out
    chunk = sorted(Path(url, "chunks", "ema").iterdir())[3]
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert main(["state", "verify", url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["kind"] == "truncated"
    assert main(["state", "verify", url]) == 1
    out = capsys.readouterr().out
    assert "TRUNCATED" in out
    assert chunk.name in out
    assert "Needed by: end" in out


def test_a_run_is_as_good_as_its_store(trained, tmp_path, capsys, monkeypatch):
    """`export RUN` finds the store, the samples' names and a place by itself."""
    url, index = trained
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps({
        "name": "mine", "data": {"train": {"url": index.url}}, "method": {"name": "en"},
        "phases": [{"name": "one", "epochs": 1, "batch": 8, "lr": 0.1}]}))
    for words in (["--format", "npz"], ["--format", "npz", "--index", index.url, "--to", "stated"]):
        assert main(["state", "export", str(tmp_path) if "--to" not in words else url, *words]) == 0
    for path in (tmp_path / "stated").iterdir():
        one, other = np.load(path), np.load(tmp_path / f"{tmp_path.name}-state" / path.name)
        assert all(np.array_equal(one[key], other[key]) for key in one.files)
    assert main(["state", "verify", str(tmp_path)]) == 0
    capsys.readouterr()
    Path(url).rename(tmp_path / "moved")
    assert main(["state", "export", str(tmp_path)]) == 2
    assert "this run has no per-sample state" in capsys.readouterr().err


def test_export_import(trained, tmp_path, capsys):
    """Parquet out and in again by key; Zarr and references for others; messages name what is missing."""
    url, index = trained
    out = str(tmp_path / "rows")
    assert main(["state", "export", url, "--to", out, "--format", "parquet"]) == 2
    assert "--index" in capsys.readouterr().err
    assert main(["state", "export", url, "--to", out, "--format", "parquet", "--index", index.url]) == 0
    other = state_store.create(str(tmp_path / "other"), index.counts, index.fingerprint, FIELDS)
    assert main(["state", "import", other.url, "--from", out, "--index", index.url, "--name", "back"]) == 0
    assert f"{index.samples} rows imported" in capsys.readouterr().out
    for shard in range(len(index.shards)):
        np.testing.assert_array_equal(other.reader("back").read_shard("ema", shard),
                                      state_store.open(url).reader("end").read_shard("ema", shard))
    assert main(["state", "export", url, "--to", str(tmp_path / "z")]) == 0
    assert main(["state", "export", url, "--to", str(tmp_path / "refs.json"), "--format", "references"]) == 0
    assert main(["state", "snapshots", other.url, "--delete", "back"]) == 0
    assert other.snapshots() == []
    assert main(["state", "export", other.url, "--to", out]) == 2
    assert "no snapshot" in capsys.readouterr().err


def test_reshard_follows_the_keys(trained, tmp_path, digit_shards, capsys):
    """The same scenes packed into other shards: every sample's state is found again at its new place."""
    url, index = trained
    pack(digits.read(410, "train"), str(tmp_path / "again"), Layout(streams=1, rows_per_shard=50, seed=9), workers=1)
    new = ShardIndex.load(str(tmp_path / "again"))
    assert new.fingerprint != index.fingerprint
    command = ["state", "reshard", url, "--index", index.url, "--new-index", new.url, "--to", str(tmp_path / "moved")]
    assert main(command) == 0, capsys.readouterr().err
    assert "410 samples moved, 0 are not in" in capsys.readouterr().out
    store = state_store.open(str(tmp_path / "moved"), new.counts, new.fingerprint, FIELDS)
    for shard in range(len(new.shards)):
        expected = [number(key) for key in new.members(shard).keys]
        np.testing.assert_array_equal(store.reader("end").read_shard("visits", shard), expected)
    assert main([*command[:4], new.url, *command[5:-1], str(tmp_path / "third")]) == 2
    assert "trained on" in capsys.readouterr().err


def test_reshard_of_a_training_run(digit_shards, tmp_path, capsys):
    """State made in training names its label sidecar: the moved store is the one that training will ask for."""
    source = ShardSource.load(str(digit_shards / "train"), "labels", None)
    index = source.index
    store = state_store.create(str(tmp_path / "state"), index.counts, SampleState.fingerprint(source), FIELDS)
    with store.session(store.begin_launch(), budget=10**7) as session:
        session.lease(0)
        session.release(0)
        session.finish()
        session.snapshot("end")
    pack(digits.read(410, "train"), str(tmp_path / "new"), Layout(streams=1, rows_per_shard=50, seed=9), workers=1)
    command = ["state", "reshard", store.url, "--index", index.url, "--new-index", str(tmp_path / "new"),
               "--to", str(tmp_path / "moved"), "--json"]
    assert main(command) == 2
    assert "--labels is needed" in capsys.readouterr().err
    assert main([*command, "--labels", "labels"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == 0
    new = ShardSource.load(str(tmp_path / "new"), "labels", None)
    state_store.open(str(tmp_path / "moved"), new.index.counts, SampleState.fingerprint(new), FIELDS)


def test_migrate_changes_fields(trained, tmp_path, capsys):
    """A wider dtype by --set, a field left behind by --drop; typos are answered with the legal names."""
    url, _ = trained
    out = str(tmp_path / "wide")
    assert main(["state", "migrate", url, "--to", out, "--set", "ema.dtype=uint16", "--drop", "visits"]) == 0
    store = state_store.open(out)
    assert list(store.schema.fields) == ["ema"]
    old = state_store.open(url).reader("end").read_shard("ema", 0)
    np.testing.assert_array_equal(store.reader("end").read_shard("ema", 0), old.astype(np.uint16) * 257)
    assert main(["state", "migrate", url, "--to", out + "2", "--set", "emma.dtype=uint16"]) == 2
    assert "ema" in capsys.readouterr().err
    assert main(["state", "verify", str(tmp_path / "nowhere")]) == 2
