"""Proves that planted faults are found: copies of training images in val and test, flipped labels, an odd image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from lacuna.data_pipelines.index import ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, SparseLabels
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.passes.trained import open_trained
from tests.helpers.naive_scores import naive_scores

FLIPS = 4


@pytest.fixture(scope="module")
def audited(trained, tmp_path_factory) -> tuple[dict, dict, str]:
    """(findings, what was planted, the page) of the run with full labels."""
    folder = tmp_path_factory.mktemp("audit")
    data = folder / "data"
    shutil.copytree(trained.data, data)
    run = folder / "run"
    shutil.copytree(trained.full, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    for split in ("train", "val", "test"):
        config["data"][split]["url"] = str(data / split)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    planted = {"leaks": {copy_into(data, "val", 2), copy_into(data, "test", 5)}, "flips": flip(data, str(run))}
    page = folder / "audit.html"
    assert main(["audit", str(run), "--out", str(page), "--few", "1000", "--most", "2000", "--workers", "1"]) == 1
    return json.loads((folder / "audit.json").read_text()), planted, page.read_text()


def copy_into(data, split: str, row: int) -> tuple[str, str]:
    """A training image takes the place of one that is as long or longer, zeros fill the rest; returns both keys."""
    source, target = ShardIndex.load(str(data / "train")), ShardIndex.load(str(data / split))
    there, members = target.members(0), source.members(row)
    at = int(there.sizes.argmax())
    shorter = int(np.flatnonzero(members.sizes <= there.sizes[at])[0])
    with open(source.shard_url(row), "rb") as f:
        f.seek(int(members.offsets[shorter]))
        image = f.read(int(members.sizes[shorter]))
    with open(target.shard_url(0), "r+b") as f:
        f.seek(int(there.offsets[at]))
        f.write(image.ljust(int(there.sizes[at]), b"\0"))
    return there.keys[at], members.keys[shorter]


def flip(data, run: str) -> set[tuple[str, str]]:
    """(key, class) of labels of val that are turned round: of the two classes that the model tells apart best, the
    positive that it is surest of and the least likely negative. (After three epochs it knows little of the others.)"""
    index = ShardIndex.load(str(data / "val"))
    labels = Sidecar.load(index, "labels")
    opened = [ShardSource(index, labels).open(shard) for shard in range(len(index.shards))]
    checkpoint = Path(open_trained(run).checkpoint)
    beliefs = np.concatenate([naive_scores(run, checkpoint, one) for one in opened])
    dense = np.concatenate([one.labels.dense(10) for one in opened])
    keys = [key for one in opened for key in one.members.keys]
    gaps = [beliefs[dense[:, c] == POSITIVE, c].mean() - beliefs[dense[:, c] == NEGATIVE, c].mean() for c in range(10)]
    made, truth = set(), dense.copy()
    for cls in np.argsort(gaps)[-2:]:
        for kind, other, values in ((POSITIVE, NEGATIVE, -beliefs), (NEGATIVE, POSITIVE, beliefs)):
            row = int(np.where(truth[:, cls] == kind, values[:, cls], np.inf).argmin())
            dense[row, cls] = other
            made.add((keys[row], index.classes[cls]))
    writer = SidecarWriter(index, "labels", NEGATIVE, {})
    starts = np.concatenate([[0], np.cumsum(index.counts)])
    for shard in range(len(index.shards)):
        writer.write(shard, SparseLabels.from_dense(dense[starts[shard] : starts[shard + 1]], NEGATIVE))
    writer.close()
    return made


def test_copies_in_other_splits_are_leaks(audited):
    found, planted, _ = audited
    pairs = {(row["sample"]["key"], row["other"]["key"]) for row in found["findings"]["leaks"]}
    assert planted["leaks"] <= pairs
    nearest = {(row["sample"]["key"], row["other"]["key"]) for row in found["findings"]["leaks"][:2]}
    assert nearest == planted["leaks"], "and nothing is nearer than they are"


def test_flipped_labels_are_doubted(audited):
    found, planted, _ = audited
    rows = [row for row in found["findings"]["wrong"] if row["sample"]["split"] == "val"]
    doubted = {(row["sample"]["key"], row["class"]) for row in rows}
    assert len(planted["flips"]) == FLIPS
    assert planted["flips"] <= doubted
    assert len(doubted) < 0.5 * 60 * 10, "and not by doubting everything"
    assert {row["annotated"] for row in rows} == {"positive", "negative"}


def test_classes_with_few_labels_and_the_page(audited):
    found, _, page = audited
    assert found["totals"]["few"] == 10
    assert found["findings"]["few"][0]["annotated_positives"] < 1000
    assert "The same sample in two splits" in page
    assert "data:image/jpeg;base64," in page
    assert "<script" not in page


def test_a_single_positive_run_is_audited_too(trained, tmp_path, capsys):
    code = main(["audit", trained.scl, "--out", str(tmp_path / "a.html"), "--json", "--workers", "1"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(found["totals"]["leaks"] > 0)
    assert all(row["annotated"] == "positive" for row in found["findings"]["wrong"]
               if row["sample"]["split"] == "train"), "the training set has no annotated negative"


def test_mistakes(trained, capsys):
    for words, said in ((["--out", "a.txt"], ".html"), (["--near", "2"], "0.1"), (["--few", "0"], "at least 1")):
        assert main(["audit", trained.scl, *words]) == 2
        assert said in capsys.readouterr().err
