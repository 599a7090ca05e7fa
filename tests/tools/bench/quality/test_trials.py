"""Proves that `lacuna bench quality` tells full from partial labels, resumes, covers every method, and states gaps."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from scipy.stats import spearmanr

from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.bench.quality import gaps, rank_correlations
from lacuna.tools.bench.quality.data import prepare
from lacuna.tools.bench.quality.features import Trials, cannot_reach
from lacuna.tools.bench.quality.generated import CLASSES, SIZES, generate
from lacuna.tools.bench.quality.photos import PHOTO_TRIALS
from lacuna.tools.bench.quality.trials import ANNOTATIONS, on_vectors
from lacuna.tools.cli import main
from lacuna.trainer.methods import METHODS
from tests.helpers.benches import bench

EVAL_DATA = os.environ.get("LACUNA_EVAL_DATA")


def quality(out, *options: str) -> tuple[dict, str]:
    return bench("quality", "--out", str(out), *options)


def test_full_labels_beat_an_and_what_is_known_is_not_trained_again(tmp_path):
    report, said = quality(tmp_path, "--quick")
    rows = report["table"]["features"]
    assert rows["oracle"]["map"] > rows["an"]["map"] + 5, rows
    assert report["ratios"] == {"features.an": 0.0, "features.oracle": 1.0}
    assert said.count("seed 0: val") == 6  # two trials of each method, and the chosen ones again with the test images
    kept = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert ["test" in line for line in kept] == [False, False, True] * 2, "a trial knows no test image"
    scores = (tmp_path / "scores.jsonl").read_text().splitlines()
    (tmp_path / "scores.jsonl").write_text("\n".join(scores[:-1]) + "\n")  # as if it had been killed in the last trial
    again, said = quality(tmp_path, "--quick")
    assert said.count("seed 0: val") == 1
    assert again["table"] == report["table"]
    assert sorted((tmp_path / "scores.jsonl").read_text().splitlines()) == sorted(scores)
    assert not os.listdir(tmp_path / "trials")


def test_trained_again_for_another_prior_or_if_given_up(tmp_path):
    folder = prepare(os.path.join(generate(str(tmp_path)), "coco_features"), str(tmp_path), 0.2)
    trial = {"lr": 1e-3, "method": {"name": "csl", "mode": "selective", "prior_threshold": 0.5}}
    trials = Trials(folder, str(tmp_path), 1)

    def score(prior: float) -> dict:
        trials.write_prior("fpc300", "csl_ignore", 0, [prior] * CLASSES)
        return trials.score(ANNOTATIONS["fpc300"], "csl_selective", trial, 0)

    try:
        low, high = score(0.1), score(0.9)  # of all classes: likely entries are ignored, or all unknown ones
        assert low["curve"] != high["curve"]
        assert score(0.1) == low
        assert score(0.9) == high
        scores = tmp_path / "scores.jsonl"
        lines = [json.loads(line) for line in scores.read_text().splitlines()]
        assert len(lines) == 2  # nothing was trained twice
        del lines[1]["test"]  # as if it had only been tried
        scores.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert score(0.9) == high
        assert len(scores.read_text().splitlines()) == 3
    finally:
        trials.close()


def test_annotations_say_no_more_than_the_truth(tmp_path):
    folder = prepare(os.path.join(generate(str(tmp_path)), "coco_features"), str(tmp_path), 0.2)
    sources = {name: ShardSource.load(os.path.join(folder, "train"), name, "train")
               for name in ("labels", "single", "iu", "iun", "fpc300", "pos10")}
    dense = {name: np.concatenate([s.sidecar.labels(i).dense(CLASSES)[s.subset.mask(i)]
                                   for i in range(len(s.index.shards))]) for name, s in sources.items()}
    truth = dense.pop("labels")
    assert len(truth) == 0.8 * SIZES["train"]
    for name, labels in dense.items():
        known = labels >= 0
        assert np.array_equal(labels[known], truth[known]), name
    assert ((dense["single"] == 1).sum(1) == 1).all()
    assert ((dense["iu"] == 0).sum(1) == 1).all()
    assert np.array_equal(dense["iun"] == 0, truth == 0)
    assert np.array_equal((dense["fpc300"] == 1).sum(0), np.minimum(300, truth.sum(0)))
    assert (dense["pos10"] == 1).sum() == round(0.1 * truth.sum())


def needs_a_file(kind) -> bool:
    return any(field.is_required() for name, field in kind.settings_type.model_fields.items() if name != "name")


def test_every_method_has_the_same_number_of_trials():
    tried = {trial["method"]["name"] for a in ANNOTATIONS.values() for trials in a.trials.values() for trial in trials}
    on_photos = {trial["method"]["name"] for trials in PHOTO_TRIALS.values() for trial in trials}
    assert {name for name, kind in METHODS.items() if on_vectors(name) and not needs_a_file(kind)} <= tried
    assert {"oracle", "an", "role", "en_cl", "mime"} <= set(ANNOTATIONS["features"].trials)
    assert {"oracle", "an", "selection", "softmax", "role", "en"} <= set(ANNOTATIONS["features_tuned"].trials)
    assert {"an_scl", "en_scl"} <= on_photos
    for annotation in ANNOTATIONS.values():
        assert {len(trials) for trials in annotation.trials.values()} == {8 if annotation.tuned else 6}
    assert {len(trials) for trials in PHOTO_TRIALS.values()} == {4}


def test_trials_are_given_up_only_when_they_cannot_win():
    assert not cannot_reach([10.0, 20.0, 30.0], 90.0, 15)  # too early to say
    assert not cannot_reach([10.0, 20.0, 30.0, 38.0], 90.0, 15)  # 11 more epochs at 8 a time
    assert cannot_reach([10.0, 20.0, 30.0, 34.0], 90.0, 15)
    assert cannot_reach([40.0, 47.0, 46.0, 45.0], 48.0, 15)  # past its best
    assert not cannot_reach([40.0, 49.0, 46.0, 45.0], 48.0, 15)  # it has won already
    assert not cannot_reach([1.0, 1.0, 1.0, 1.0], 48.0, 4)  # finished


def test_gaps():
    rows = gaps({"an": [40.0, 42.0], "oracle": [51.0], "role": [46.0]}, "an")
    assert rows["role"] == {"map": 46.0, "std": 0.0, "gap_closed": 0.5}
    assert rows["an"] == {"map": 41.0, "std": 1.0, "gap_closed": 0.0}
    assert gaps({"role": [46.0]}, "an")["role"]["gap_closed"] is None


def test_rank_correlations():
    truth, told = np.array([900, 40, 500, 300, 20, 700]), np.array([300, 40, 300, 300, 20, 300])
    means = np.array([[0.9, 0.4, 0.5, 0.3, 0.2, 0.7], [0.3, 0.2, 0.7, 0.9, 0.1, 0.5]])  # right; frequent ones reversed
    found = rank_correlations(means, truth, told)
    assert found["spearman_hidden"] == pytest.approx((1 - 1) / 2)
    assert found["spearman"] == pytest.approx(np.mean([spearmanr(m, truth).statistic for m in means]), abs=1e-3)
    assert found["spearman_annotations"] == pytest.approx(spearmanr(told, truth).statistic, abs=1e-3)
    assert rank_correlations(np.full((1, 6), 0.5), truth, told)["spearman"] is None  # all alike: no ranks


@pytest.mark.parametrize(("options", "said"), [
    (["--data", "nowhere", "--sets", "features"], "no folder coco_features"),
    (["--sets", "features", "--trial", '{"lr": 1}'], "needs the keys lr and method"),
    (["--sets", "features", "--methods", "role", "bogus"], "--methods bogus: legal"),
    (["--sets", "features", "--trial", "{"], "--trial '{': not a JSON object"),
])
def test_bad_options_are_named(options, said, tmp_path, capsys):
    assert main(["bench", "quality", "--out", str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not EVAL_DATA, reason="LACUNA_EVAL_DATA is not set: no evaluation data")
def test_published_features_are_what_the_numbers_were_made_with(tmp_path):
    assert EVAL_DATA
    folder = prepare(os.path.join(EVAL_DATA, "coco_features"), str(tmp_path), 0.2)
    train = ShardSource.load(os.path.join(folder, "train"), "labels", "train")
    assert (int(train.rows.sum()), train.classes) == (12_800, 80)
    assert train.subset_counts()[0].sum() / 12_800 == pytest.approx(2.94, abs=0.03)
