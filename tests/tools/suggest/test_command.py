"""Proves that suggestions are the unknown entries above the thresholds that the evidence allows, decisions included."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.suggest.promise import Evidence, estimated_precision, judge
from lacuna.tools.suggest.table import COLUMNS, write_sidecar, write_table
from tests.helpers.answering import answer_all, decisions
from tests.helpers.damaged_shards import blank_out
from tests.helpers.naive_scores import naive_scores


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory) -> tuple[dict, list[dict], str]:
    """What the command says and writes about the training set of the single-label run."""
    import contextlib
    import io

    out, text = str(tmp_path_factory.mktemp("suggest") / "s.csv"), io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["suggest", trained.scl, "--out", out, "--precision", "0.3", "--delta", "0.4", "--pool",
                     "--truth", "labels", "--sidecar", "suggested", "--workers", "1", "--json"]) == 0
    with open(out, encoding="utf-8", newline="") as f:
        return json.loads(text.getvalue()), list(csv.DictReader(f)), out


def test_suggestions_equal_a_plain_loop(trained, made):
    facts, table, _ = made
    run = open_trained(trained.scl)

    def everything(split: str, labels: str) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
        source = ShardSource.load(str(trained.data / split), labels, None)
        opened = [source.open(s) for s in range(len(source.index.shards))]
        return (np.concatenate([naive_scores(trained.scl, Path(run.checkpoint), o) for o in opened]),
                np.concatenate([o.labels.dense(10) for o in opened]),
                [(o.shard, row) for o in opened for row in range(len(o.members.keys))])

    val_scores, val_labels, _ = everything("val", "labels")
    scores, labels, places = everything("train", "single")
    evidence = [Evidence(-np.sort(-scores[labels[:, c] == UNKNOWN, c]), int((labels[:, c] == UNKNOWN).sum()),
                         val_scores[val_labels[:, c] == NEGATIVE, c]) for c in range(10)]
    limits = np.array([judge(one, 0.3, 0.4).threshold for one in evidence])
    rest = np.flatnonzero(np.isinf(limits))
    open_scores = np.where(labels == UNKNOWN, scores, -np.inf)
    top = open_scores[:, rest].max(axis=1)
    together = Evidence(-np.sort(-top[np.isfinite(top)]), int(np.isfinite(top).sum()),
                        np.where(val_labels == NEGATIVE, val_scores, -np.inf)[:, rest].max(axis=1), pool=True)
    pool_limit = judge(together, 0.3, 0.4).threshold
    expected = {(*places[i], c) for i, c in zip(*np.nonzero(open_scores >= limits), strict=True)}
    pooled = {(*places[i], int(rest[open_scores[i, rest].argmax()])) for i in np.flatnonzero(top >= pool_limit)}
    # A class that by its own estimate falls short is left out of the pool.
    kept = {c for c in rest.tolist() if estimated_precision(evidence[c], np.array([pool_limit]))[0] >= 0.3}
    expected |= {entry for entry in pooled if entry[2] in kept}
    unsure = {(*places[i], c) for i, c in zip(*np.nonzero(np.abs(scores - np.where(
        np.isinf(limits), pool_limit, limits)) < 1e-5), strict=True)}
    found = {(int(row["shard"]), int(row["row"]), int(row["class"])) for row in table}
    assert len(found) == len(table) == facts["suggestions"] > 10
    assert len(found ^ expected - unsure) <= len(unsure) + 2, "an image's surest entry may change by rounding"
    assert {row["promise"] for row in table if int(row["class"]) in rest} <= {"pool"}
    assert facts["pooled_suggestions"] == sum(row["promise"] == "pool" for row in table)
    truth = everything("train", "labels")[1]
    right = sum(truth[places.index((shard, row)), cls] == POSITIVE for shard, row, cls in found)
    assert facts["precision"] == pytest.approx(right / len(found))
    assert facts["recall"] == pytest.approx(right / np.sum((labels == UNKNOWN) & (truth == POSITIVE)))


def test_the_table_names_samples_and_classes(trained, made, tmp_path):
    _, table, _ = made
    index = ShardIndex.load(str(trained.data / "train"))
    assert tuple(table[0]) == COLUMNS
    for row in table[:: max(1, len(table) // 20)]:
        assert row["key"] == index.members(int(row["shard"])).keys[int(row["row"])]
        assert row["name"] == index.classes[int(row["class"])]
    order = [(int(row["class"]), -float(row["score"])) for row in table]
    assert order == sorted(order), "by class, the surest first"
    columns = {name: [row[name] for row in table] for name in COLUMNS}
    write_table(str(tmp_path / "s.parquet"), columns)
    assert pq.read_table(tmp_path / "s.parquet").to_pydict() == columns


def test_the_sidecar_is_read_back(trained, made):
    """Labels plus suggestions, nothing else; training opens it like any other sidecar."""
    _, table, _ = made
    source = ShardSource.load(str(trained.data / "train"), "suggested", None)
    base = Sidecar.load(source.index, "single")
    expected = {s: base.labels(s).dense(10) for s in range(len(source.index.shards))}
    for row in table:
        expected[int(row["shard"])][int(row["row"]), int(row["class"])] = POSITIVE
    for shard, dense in expected.items():
        np.testing.assert_array_equal(source.sidecar.labels(shard).dense(10), dense)
    with pytest.raises(UserError, match="one already"):
        write_sidecar(base, "suggested", {}, {})


def test_mistakes(trained, tmp_path, capsys):
    out = str(tmp_path / "s.csv")
    for arguments, words in ((["--out", "s.txt"], ".csv, .parquet"), (["--out", out, "--precision", "90"], "between"),
                             (["--out", out, "--delta", "0"], "0.05"),
                             (["--out", out, "--max-per-class", "0"], "at least 1"),
                             (["--out", out, "--labels", "labels"], "knows every entry")):
        assert main(["suggest", trained.scl, *arguments]) == 2
        assert words in capsys.readouterr().err


def test_corrupt_samples_are_judged(trained, tmp_path, capsys):
    """More than data.max_bad_fraction of the training samples are an error, and nothing is written."""
    shutil.copytree(trained.data / "train", tmp_path / "train")
    blank_out(ShardIndex.load(str(tmp_path / "train")), 0, 3)
    out = tmp_path / "s.csv"
    assert main(["suggest", trained.scl, "--shards", str(tmp_path / "train"), "--labels", "single", "--out", str(out),
                 "--workers", "1"]) == 2
    assert "1 of " in (said := capsys.readouterr().err)
    assert "cannot be decoded" in said
    assert "data.max_bad_fraction" in said
    assert not out.exists()


def test_without_validation_nothing_is_promised(trained, tmp_path, capsys):
    """Until questions drawn by lot are answered: then their answers alone carry the promise."""
    run = tmp_path / "alone"
    shutil.copytree(trained.scl, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["data"]["val"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    out = str(tmp_path / "s.csv")
    command = ["suggest", str(run), "--out", out, "--precision", "0.05", "--truth", "labels", "--workers", "1",
               "--json"]
    assert main(command) == 2
    assert "nothing can be promised" in capsys.readouterr().err
    assert main(["select", str(run), "--by", "lot", "--budget", "300", "--top", "100", "--out", str(tmp_path / "q.csv"),
                 "--workers", "1"]) == 0
    assert main(command) == 2, "asked is not answered"
    answer_all(str(run), trained.data / "train", "single", "labels")
    capsys.readouterr()
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["decisions"] == 300
    assert facts["suggestions"] > 0
    assert facts["assumes"] == "nothing"
    with open(out, encoding="utf-8", newline="") as f:
        found = {(int(row["shard"]), int(row["row"]), int(row["class"])) for row in csv.DictReader(f)}
    assert not found & set(decisions(str(run), trained.data / "train", "single").made), "decided is not suggested again"
