"""Proves that `lacuna inspect` reports a store's schema, sizes, histograms and single samples as they really are."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import yaml

from lacuna import state_store
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.state_store import Constant, Field, Given
from lacuna.state_store.topk import topk_fields
from lacuna.tools.cli import main
from lacuna.tools.inspect_state import bars

L, W = 10, 4
FIELDS = [Field("score", (L,), "uint8", Constant(0.0), range=(0, 1), histogram=True),
          Field("heat", (L, W, W), "uint8", Given("positives"), range=(0, 1)),
          *topk_fields("best", 3, L, "float32"), Field("visits", (), "int32")]


@pytest.fixture(scope="module")
def run(digit_shards, tmp_path_factory) -> tuple[str, ShardIndex]:
    """A run folder whose store holds, about row r of shard s, numbers made from s and r; shard 3 was never written."""
    folder = tmp_path_factory.mktemp("run")
    index = ShardIndex.load(str(digit_shards / "train"))
    # As in training: the fingerprint names the label sidecar too.
    fingerprint = f"{index.fingerprint}-{Sidecar.load(index, 'labels').fingerprint}-"
    store = state_store.create(str(folder / "state"), index.counts, fingerprint, FIELDS)
    with store.session(store.begin_launch(), budget=10**7, initials={"heat": lambda s: _heat(index, s)}) as session:
        for shard in set(range(len(index.shards))) - {3}:
            session.lease(shard)
            rows = np.arange(index.shards[shard].count)
            where = np.full(len(rows), shard), rows
            session.scatter("score", *where, ((rows[:, None] + 7 * np.arange(L)) % 256).astype(np.uint8))
            session.scatter("heat", *where, np.full((len(rows), L, W, W), 51, np.uint8))
            session.scatter("best_ids", *where, np.tile(np.array([4, 9, -1], np.int16), (len(rows), 1)))
            session.scatter("best_values", *where, np.tile(np.array([0.25, 0.75, 0], np.float32), (len(rows), 1)))
            session.scatter("visits", *where, (1000 * shard + rows).astype(np.int32))
            session.release(shard)
        session.finish()
        session.snapshot("end", {"epoch": 1})
    config = {"name": "r", "data": {"train": {"url": index.url}}, "phases": [{"name": "p", "epochs": 1, "batch": 8,
                                                                              "lr": 0.1}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder), index


def _heat(index: ShardIndex, shard: int) -> np.ndarray:
    return np.zeros((index.shards[shard].count, L, W, W), np.float32)


def inspect(capsys, *arguments: str) -> dict:
    assert main(["inspect", *arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_overview_equals_the_store(run, capsys):
    folder, index = run
    facts = inspect(capsys, folder, "--values", "--histograms", index.classes[2])
    assert facts == inspect(capsys, folder + "/state", "--values", "--histograms", "2")
    assert (facts["rows"], facts["shards"], facts["snapshot"]) == (index.samples, len(index.shards), "end")
    fields = {field["name"]: field for field in facts["fields"]}
    written = index.samples - index.shards[3].count
    assert fields["score"]["written"] == len(index.shards) - 1
    assert fields["score"]["logical_bytes"] == written * L
    assert fields["heat"]["values"] == {"smallest": pytest.approx(0.2), "mean": pytest.approx(0.2),
                                        "largest": pytest.approx(0.2)}
    assert fields["heat"]["ratio"] > 10, "a constant compresses"
    # The naive histogram of class 2, with the rows that were never written at 0.
    codes = np.concatenate([(np.arange(s.count) + 14) % 256 if i != 3 else np.zeros(s.count, int)
                            for i, s in enumerate(index.shards)])
    expected = np.bincount(codes // 16, minlength=16)
    assert facts["histograms"]["score"]["classes"] == {index.classes[2]: expected.tolist()}
    assert sum(facts["histograms"]["score"]["all"]) == index.samples * L


def test_one_sample_in_words(run, capsys):
    """By place and by key, with labels and class names; a shard that was never written says where it starts."""
    folder, index = run
    key = index.members(5).keys[7]
    facts = inspect(capsys, folder, "--sample", "5/7")
    assert facts == inspect(capsys, folder, "--sample", key)
    assert facts["key"] == key
    truth = Sidecar.load(index, "labels").labels(5).positives(7)
    assert facts["positives"] == [index.classes[i] for i in truth]
    assert facts["fields"]["visits"]["value"] == 5007
    assert facts["fields"]["score"]["strongest"][0] == [index.classes[9], pytest.approx(70 / 255)]
    assert facts["fields"]["best_values"]["values"] == {index.classes[4]: 0.25, index.classes[9]: 0.75}
    assert np.shape(facts["fields"]["heat"]["map"]["values"]) == (W, W)
    assert main(["inspect", folder, "--sample", "3/0"]) == 0
    assert "heat: never written, starts from given positives" in capsys.readouterr().out
    assert main(["inspect", folder, "--sample", key]) == 0
    out = capsys.readouterr().out
    assert f"{index.classes[9]} 0.275" in out
    assert "|" + 2 * W * ":" + "|" in out


def test_text_and_mistakes(run, capsys, tmp_path):
    folder, index = run
    assert main(["inspect", folder]) == 0
    out = capsys.readouterr().out
    assert "→ end" in out
    assert f"{len(index.shards) - 1} of {len(index.shards)}" in out
    for arguments, words in ((["--sample", "99/0"], "shards 0..12"), (["--sample", "nobody"], "whole key"),
                             (["--histograms", "dog"], "no such class"), (["--snapshot", "e9"], "end"),
                             (["--index", str(tmp_path)], "index.json")):
        assert main(["inspect", folder, *arguments]) == 2
        assert words in capsys.readouterr().err
    shutil.copy(folder + "/config.yaml", tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "keeps no per-sample state" in capsys.readouterr().err


def test_bars_are_logarithmic():
    assert bars([0, 0, 0]) == "   "
    assert bars([0, 1, 10**6]) == " ▁█"
