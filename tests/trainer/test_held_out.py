"""Proves that held-out samples are never trained on and are the same everywhere, and that ranks are counted right."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import lacuna
from lacuna.tools.cli import main
from lacuna.trainer.held_out import KnownRanks, describe
from lacuna.trainer.training_data import training_source, without_held_out
from lacuna.trainer.world import World
from tests.helpers.launching import Launch, trace
from tests.helpers.run_configs import config

ALONE = World(torch.device("cpu"))


def naive_ranks(scores: np.ndarray, targets: np.ndarray) -> list[int]:
    ranks = []
    for row, known in zip(scores, targets, strict=True):
        for cls in np.flatnonzero(known == 1):
            ranks.append(1 + sum(row[other] > row[cls] for other in range(len(row)) if known[other] != 1))
    return ranks


@pytest.mark.parametrize("k", [None, 1.7])
def test_ranks_recall_and_threshold(k):
    rng = np.random.default_rng(0)
    scores = rng.random((400, 12)).astype(np.float32)
    targets = rng.choice([1, 0, -1], (400, 12), p=[0.1, 0.1, 0.8]).astype(np.int8)
    found = KnownRanks(12, 400, k)
    for start in range(0, 400, 64):
        found.add(scores[start : start + 64], targets[start : start + 64])
    summary, ranks = found.summary(ALONE), np.array(naive_ranks(scores, targets))
    assert summary["labels"] == len(ranks)
    for depth in (1, 3, 5):
        assert summary[f"recall_at_{depth}"] == pytest.approx(100 * (ranks <= depth).mean())
    assert summary["median_rank"] == np.sort(ranks)[(len(ranks) - 1) // 2]
    assert ("threshold" in summary) == (k is not None)
    if k is not None:
        assert (scores >= np.float32(summary["threshold"])).sum() == round(k * 400)
        expected = 100 * (scores[targets == 1] >= np.float32(summary["threshold"])).mean()
        assert summary["recall_at_threshold"] == pytest.approx(expected)


def test_a_model_that_scores_all_alike_is_in_the_middle():
    ranks = KnownRanks(11, 4, None)
    ranks.add(np.zeros((4, 11), np.float32), np.where(np.arange(11) == 3, 1, -1).astype(np.int8)[None].repeat(4, 0))
    assert ranks.summary(ALONE)["median_rank"] == 6


def test_few_labels_are_said_and_give_no_threshold():
    ranks = KnownRanks(3, 2, 1.0)
    ranks.add(np.array([[0.9, 0.1, 0.2], [0.3, 0.5, 0.4]], np.float32), np.array([[1, -1, -1], [1, -1, -1]], np.int8))
    summary = ranks.summary(ALONE)
    assert "threshold" not in summary
    assert describe(summary, "image", 3) == (
        "of 2 known labels of 2 held-out images, 50 % come first of 3 classes (by chance: 33 %); only 2 labels, so "
        "take it with care")


def test_a_run_without_val(single_shards, tmp_path):
    """What is held out is seen by no step, every other sample once per epoch; results, API and tools agree."""
    own = lacuna.load_config(
        "demo", "name=alone", f"run_folder={tmp_path}", f"data.train.url={single_shards}/train", "data.val=null",
        "data.test=null", "data.hold_out=0.2", "method={name: an}", "model.expected_positives=2",
        "phases.0.epochs=1", "phases.1.epochs=1", "train.trace_samples=true")
    outcome = lacuna.train(own)
    plain = own.model_copy(update={"data": own.data.model_copy(update={"hold_out": 0.0})})
    whole = int(training_source(plain).counts.sum())
    ours, others = without_held_out(own, training_source(plain))
    assert others is not None
    held = {(shard, int(row)) for shard in range(len(ours.counts)) for row in np.flatnonzero(others.subset.mask(shard))}
    seen = [sample for samples in trace(tmp_path / "alone").values() for sample in samples]
    assert not held & set(seen)
    assert len(seen) == 2 * len(set(seen)) == 2 * (whole - len(held))
    assert 0.1 * whole < len(held) < 0.3 * whole
    assert outcome.held_out["samples"] == len(held) == outcome.held_out["labels"]
    assert 0 < outcome.held_out["recall_at_1"] <= outcome.held_out["recall_at_3"]
    assert (training_source(own).counts == ours.counts).all()
    text = (tmp_path / "alone" / "log.txt").read_text()
    assert f"held out {len(held)}" in text
    assert f"`lacuna select {own.folder} --budget 100`" in text
    assert main(["export", own.folder, "--out", str(tmp_path / "model"), "--no-onnx"]) == 0
    labels = json.loads((tmp_path / "model" / "labels.json").read_text())
    assert {entry["threshold"] for entry in labels["classes"]} == {outcome.held_out["threshold"]}
    assert labels["source"]["thresholds_from"].startswith("held-out samples: as many labels per sample as expected")


def test_with_val_nothing_is_held_out(single_shards):
    own = lacuna.load_config("demo", f"data.train.url={single_shards}/train", f"data.val.url={single_shards}/val",
                             "data.hold_out=0.2")
    assert training_source(own).subset is None


@pytest.mark.long
def test_two_ranks_measure_the_same(single_shards, tmp_path):
    """The same samples, each counted once; single ranks may differ where sums are rounded in another order."""
    found = []
    for ranks in (1, 2):
        body = config(single_shards, f"on-{ranks}")
        body["data"] |= {"train": {"url": str(single_shards / "train"), "labels": "single"}, "hold_out": 0.2}
        body["data"].pop("val")
        body["phases"] = body["phases"][1:]
        Launch(body, tmp_path, ranks).ok()
        found.append(json.loads((tmp_path / f"on-{ranks}" / "results.json").read_text())["held_out"])
    one, two = found
    assert (one["samples"], one["labels"]) == (two["samples"], two["labels"])
    for key in ("recall_at_1", "recall_at_3", "recall_at_threshold"):
        assert one[key] == pytest.approx(two[key], abs=2.5 * 100 / one["labels"])
    assert one["threshold"] == pytest.approx(two["threshold"], abs=1e-3)
