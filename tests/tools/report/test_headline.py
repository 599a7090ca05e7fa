"""Proves that the first screen of a report says what the runs hold: gap, classes, pictures, and what without val."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from lacuna import state_store
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.tools.cli import main
from lacuna.tools.report.findings import Surest


def page_data(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert main(["report", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def copied(run: str, folder: Path, name: str, **changes) -> str:
    """A run folder with another name and other settings, of the same results and state."""
    shutil.copytree(run, folder / name, ignore=shutil.ignore_patterns("trace", "checkpoints"))
    config = yaml.safe_load((folder / name / "config.yaml").read_text())
    (folder / name / "config.yaml").write_text(yaml.safe_dump({**config, "name": name, **changes}))
    return str(folder / name)


def test_one_run_and_its_ceiling(trained, capsys):
    data = page_data(capsys, trained.scl, "--oracle", trained.full)
    head = data["headline"]
    assert (head["run"], head["split"], head["score"]) == ("scl", "test", data["runs"][0]["scores"]["test"])
    assert head["gap"]["rows"] == [], "the only run is the baseline itself"
    assert (head["gap"]["low"]["run"], head["gap"]["high"]["run"]) == ("scl", "full")
    assert head["classes"]["against"] is None
    aps = sorted((row["ap"][0] for row in data["classes"]["rows"]), reverse=True)
    assert [c["ap"] for c in head["classes"]["up"]] == aps[:5]
    assert [c["ap"] for c in head["classes"]["down"]] == aps[:4:-1]
    assert any("410 images, 10 classes" in line for line in head["trained"])
    assert any("1 of 10 labels known" in line for line in head["trained"])


def test_the_best_by_validation_against_the_baseline(trained, tmp_path, capsys):
    """Of several runs the headline takes neither baseline nor ceiling; gains and losses are to the baseline."""
    an = copied(trained.scl, tmp_path, "an", method={"name": "an"})
    results = json.loads((tmp_path / "an" / "results.json").read_text())
    results["test"]["map_skip_empty"] -= 10
    (tmp_path / "an" / "results.json").write_text(json.dumps(results))
    lines = (tmp_path / "an" / "test_classes.csv").read_text().splitlines()
    column = lines[0].split(",").index("ap")
    cells = [line.split(",") for line in lines]
    for i, cell in enumerate(cells[1:]):
        cell[column] = str(0.01 * i)
    (tmp_path / "an" / "test_classes.csv").write_text("\n".join(",".join(cell) for cell in cells) + "\n")
    data = page_data(capsys, an, trained.scl, "--oracle", trained.full)
    head = data["headline"]
    assert head["run"] == "scl"
    low, own, high = (run["scores"]["test"] for run in data["runs"])
    assert [row["closed"] for row in head["gap"]["rows"]] == [pytest.approx((own - low) / (high - low))]
    changes = {row["name"]: row["ap"][1] - row["ap"][0] for row in data["classes"]["rows"]}
    assert head["classes"]["against"] == "an"
    expected = sorted(changes, key=lambda name: -changes[name])[:5]
    assert [c["name"] for c in head["classes"]["up"]] == [name for name in expected if changes[name] > 0]
    assert all(c["change"] == pytest.approx(changes[c["name"]]) for c in head["classes"]["up"])


def test_without_a_number_it_says_what_it_can(trained, tmp_path, capsys):
    run = copied(trained.scl, tmp_path, "silent")
    Path(run, "results.json").unlink()
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if not key.startswith("val_")} for line in lines]
    Path(run, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    head = page_data(capsys, run)["headline"]
    assert head["score"] is None
    said = " ".join(head["said"])
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert "There is no mAP" in said
    assert f"{losses[0]:.4g}" in said
    assert f"{losses[-1]:.4g}" in said
    store, index = state_store.open(run + "/state"), ShardIndex.load(str(trained.data / "train"))
    reader = store.reader(store.snapshots()[-1].name)
    beliefs = np.concatenate([reader.read_shard("score", s) for s in range(len(index.shards))]) / np.float32(255)
    known = np.concatenate([Sidecar.load(index, "single").labels(s).dense(10) for s in range(len(index.shards))])
    assert f"sure of {int(((known == UNKNOWN) & (beliefs >= 0.9)).sum()):,} labels" in said
    assert f"expects {beliefs.sum(1, dtype=np.float64).mean():.2f} positives" in said


def test_pictures_are_the_surest_findings(trained, capsys):
    """Against a plain loop over every entry of the store."""
    head = page_data(capsys, trained.scl, "--oracle", trained.full)["headline"]
    store, index = state_store.open(trained.scl + "/state"), ShardIndex.load(str(trained.data / "train"))
    reader = store.reader(store.snapshots()[-1].name)
    found = []
    for shard in range(len(index.shards)):
        beliefs = reader.read_shard("score", shard)
        known, truth = (Sidecar.load(index, name).labels(shard).dense(10) for name in ("single", "labels"))
        keys = index.members(shard).keys
        found += [(int(beliefs[r, c]), keys[r], index.classes[c], bool(truth[r, c] == POSITIVE))
                  for r in range(len(keys)) for c in range(10) if known[r, c] == UNKNOWN]
    right = max(belief for belief, *_, is_right in found if is_right)
    assert head["pictures"][0]["belief"] == pytest.approx(right / 255)
    assert len({p["name"] for p in head["pictures"]}) == len({p["key"] for p in head["pictures"]}) == 3
    for picture in head["pictures"]:
        assert (picture["key"], picture["name"]) in {(key, name) for _, key, name, is_right in found
                                                     if is_right == (picture["verdict"] == "right")}
        assert picture["heat"].startswith("data:image/jpeg")
        assert len(picture["annotated"]) == 1


def test_an_error_takes_the_third_place():
    """Two right ones and the surest error of another class and image; without errors three right ones; with no truth
    known, the three surest."""
    known = np.full((4, 5), UNKNOWN, np.int8)
    beliefs = np.arange(20).reshape(4, 5).astype(np.float32) / 20
    truth = np.full((4, 5), POSITIVE, np.int8)
    surest = Surest()
    surest.offer(7, np.array([0, 1, 2, 3]), beliefs, known, truth)
    # Every class's surest entry is in the last row: one image cannot be shown twice.
    assert [(f.shard, f.row, f.cls) for f in surest.pick()] == [(7, 3, 4)]
    mixed, rng = Surest(), np.random.default_rng(0)
    beliefs = rng.random((40, 5)).astype(np.float32)
    truth = rng.choice(np.array([POSITIVE, NEGATIVE], np.int8), (40, 5))
    mixed.offer(0, np.arange(40), beliefs, np.full((40, 5), UNKNOWN, np.int8), truth)
    assert [f.truth for f in mixed.pick()] == [POSITIVE, POSITIVE, NEGATIVE]
    open_truth = Surest()
    open_truth.offer(0, np.arange(40), beliefs, np.full((40, 5), UNKNOWN, np.int8), None)
    best = max((float(beliefs[r, c]), r, c) for r in range(40) for c in range(5))
    first = open_truth.pick()[0]
    assert (first.belief, first.row, first.cls) == best
