"""Proves that suggestions are the unknown entries above thresholds that keep the asked precision on validation data."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.suggest import choose
from lacuna.tools.suggest.table import COLUMNS, write_sidecar, write_table
from tests.helpers.damaged_shards import blank_out
from tests.helpers.naive_scores import naive_scores


def naive_threshold(scores: np.ndarray, labels: np.ndarray, annotated: float, precision: float) -> float:
    """Try every score; the lowest that is good enough."""
    observed = min(annotated / np.mean(labels == POSITIVE), 0.95)
    best = np.inf
    for limit in np.unique(scores):
        taken = scores >= limit
        right, wrong = np.sum(taken & (labels == POSITIVE)) * (1 - observed), np.sum(taken & (labels == NEGATIVE))
        if (wrong + 1) / (right + wrong + 1) <= 1 - precision:
            best = min(best, limit)
    return best


@pytest.mark.parametrize("precision", [0.5, 0.8, 0.95])
def test_thresholds_equal_trying_them_all(precision):
    rng = np.random.default_rng(3)
    labels = (rng.random((400, 6)) < [0.5, 0.3, 0.1, 0.02, 0.3, 0.3]).astype(np.int8)
    labels[:, 4][rng.random(400) < 0.3] = UNKNOWN
    scores = np.clip(0.25 * labels + rng.random((400, 6)), 0, 1).round(2).astype(np.float32)  # many ties
    annotated = np.array([0.2, 0.0, 0.09, 0.02, 0.1, 0.29])
    found = choose(scores, labels, annotated, precision)
    for cls in range(6):
        known = labels[:, cls] != UNKNOWN
        assert found.thresholds[cls] == pytest.approx(
            naive_threshold(scores[known, cls], labels[known, cls], annotated[cls], precision)), cls
        # The promise of a score: the precision of everything at or above it.
        limit = float(np.median(scores[known, cls]))
        taken = scores[known, cls] >= limit
        observed = min(annotated[cls] / np.mean(labels[known, cls] == POSITIVE), 0.95)
        right = (labels[known, cls] == POSITIVE)[taken].sum() * (1 - observed)
        expected = right / (right + (labels[known, cls] == NEGATIVE)[taken].sum())
        (promised,) = found.precision_at(np.array([cls]), np.array([limit]))
        assert promised == pytest.approx(expected)


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory) -> tuple[dict, list[dict], str]:
    """What the command says and writes about the training set of the single-label run."""
    import contextlib
    import io

    out, text = str(tmp_path_factory.mktemp("suggest") / "s.csv"), io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["suggest", trained.scl, "--out", out, "--precision", "0.6", "--truth", "labels", "--sidecar",
                     "suggested", "--workers", "1", "--json"]) == 0
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
    limits = [naive_threshold(val_scores[:, c], val_labels[:, c], float(np.mean(labels[:, c] == POSITIVE)), 0.6)
              for c in range(10)]
    expected = {(*places[i], c) for i, c in zip(*np.nonzero((labels == UNKNOWN) & (scores >= limits)), strict=True)}
    unsure = {(*places[i], c) for i, c in zip(*np.nonzero(np.abs(scores - limits) < 1e-5), strict=True)}
    found = {(int(row["shard"]), int(row["row"]), int(row["class"])) for row in table}
    assert len(found) == len(table) == facts["suggestions"] > 10
    assert found ^ expected <= unsure
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
