"""Proves that every command ranks, thresholds and exports by the method's own scores: here a softmax over classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.eval.thresholds import read_thresholds
from lacuna.tools.export import export, export_onnx
from lacuna.tools.export.folder import Exported
from lacuna.tools.passes.scoring import ScoreJob, ShardModel
from lacuna.tools.passes.trained import load_model, open_trained
from lacuna.trainer.scores import SIGMOID, SOFTMAX
from tests.helpers.launching import Launch


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory) -> str:
    data = {**{split: {"url": str(trained.data / split)} for split in ("train", "val", "test")}, "image_size": 32,
            "normalize": "centered", "streams": 4, "augment": {"flip": False}}
    launch = Launch({"name": "softmax", "data": {**data, "train": {**data["train"], "labels": "single"}},
                     "model": {"backbone": "lacuna:tiny", "head_norm": "l2"}, "method": {"name": "softmax"},
                     "train": {"log_every": 5},
                     "phases": [{"name": "only", "epochs": 2, "batch": 32, "lr": 3e-3}]},
                    tmp_path_factory.mktemp("softmax"), 1)
    launch.ok(600)
    return str(launch.folder)


@pytest.fixture(scope="module")
def logits(run, trained) -> dict[int, np.ndarray]:
    """shard → logits of the test set, as the model says them."""
    found, source = open_trained(run), ShardSource.load(str(trained.data / "test"), "labels", None)
    model = ShardModel(load_model(found, source, torch.device("cpu")), source, found.config)
    return {shard: model.run(shard, lambda model, inputs: model(inputs)[0])[0]
            for shard in range(len(source.index.shards))}


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(1, keepdims=True)


def test_evaluation_ranks_by_probabilities(run, trained, logits):
    source = ShardSource.load(str(trained.data / "test"), "labels", None)
    truth = np.concatenate([source.sidecar.labels(s).dense(10) for s in logits]) == 1
    every = np.concatenate(list(logits.values()))

    def mean_precision(scores: np.ndarray) -> float:
        return 100 * float(np.mean([average_precision_score(truth[:, c], scores[:, c]) for c in range(10)]))

    reported = json.loads(Path(run, "results.json").read_text())["test"]["map"]
    # Batches of another size round otherwise, and a model of two epochs has scores that differ by that alone: the
    # mean lies between the two that rounding against and for every positive would give. Without near ties they meet.
    scores = softmax(every)
    assert mean_precision(scores - 1e-7 * truth) - 1e-9 <= reported <= mean_precision(scores + 1e-7 * truth) + 1e-9
    assert abs(reported - mean_precision(every)) > 0.1  # ranking by logits is something else


def test_passes_over_shards_score_likewise(run, trained, logits):
    source = ShardSource.load(str(trained.data / "test"), "labels", None)
    work = ScoreJob(open_trained(run), source).build()
    np.testing.assert_allclose(work(0)["scores"], softmax(logits[0]), atol=1e-6)


def test_an_exported_model_carries_the_activation(run, trained, logits, tmp_path, capsys):
    exported = export(open_trained(run), str(tmp_path / "model"), np.full(10, 0.2), "nowhere")
    body = json.loads((tmp_path / "model" / "labels.json").read_text())
    assert body["activation"] == "softmax"
    assert body["rule"] == SOFTMAX.rule
    assert Exported.load(exported.folder).score is SOFTMAX
    assert export_onnx(exported) in (None, pytest.approx(0, abs=1e-5))
    source = ShardSource.load(str(trained.data / "test"), "labels", None)
    opened = source.open(0)
    (tmp_path / "first.png").write_bytes(opened.read(0))
    assert main(["predict", exported.folder, str(tmp_path / "first.png"), "--top", "10", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    found = {entry["class"]: entry["probability"] for entry in line["top"]}
    expected = softmax(logits[0])[0]
    np.testing.assert_allclose([found[str(c)] for c in range(10)], expected, atol=1e-5)
    assert {entry["class"] for entry in line["predicted"]} == {str(c) for c in range(10) if expected[c] >= 0.2}


def test_an_unknown_activation_is_damage(run, tmp_path):
    exported = export(open_trained(run), str(tmp_path / "model"), None, None)
    labels = tmp_path / "model" / "labels.json"
    labels.write_text(labels.read_text().replace('"softmax"', '"softmin"', 1))
    with pytest.raises(UserError, match=r"labels\.json: damaged .*softmin"):
        Exported.load(exported.folder)


def test_the_report_says_that_scores_only_rank(run, trained, capsys):
    assert main(["report", run, trained.full, "--json"]) == 0
    absent = json.loads(capsys.readouterr().out)["absent"]
    (entry,) = [entry for entry in absent if entry["what"] == "probabilities of single classes"]
    assert entry["run"] == "softmax"
    assert "depends on the image's other classes" in entry["why"]


def test_thresholds_of_other_scores_are_refused(tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"rule": SIGMOID.rule, "classes": [{"id": None, "name": "a", "threshold": 0.5}]}))
    assert read_thresholds(str(path), ["a"], [], SIGMOID.rule) == [0.5]
    with pytest.raises(UserError, match=r"thresholds\.json: made for other scores"):
        read_thresholds(str(path), ["a"], [], SOFTMAX.rule)
