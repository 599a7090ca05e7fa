"""Proves that `lacuna bench quality` tells full from partial labels, resumes, covers every method, and states gaps."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from scipy.stats import spearmanr

from lacuna import state_store
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.bench.quality import gaps, rank_correlations
from lacuna.tools.bench.quality.data import prepare
from lacuna.tools.bench.quality.features import FeatureRows
from lacuna.tools.bench.quality.generated import CLASSES, SIZES, generate
from lacuna.tools.bench.quality.photos import PHOTO_SETS
from lacuna.tools.bench.quality.trials import ANNOTATIONS, SINGLE, on_vectors
from lacuna.tools.cli import main
from lacuna.tools.passes.pool import PoolSettings, ray_room
from lacuna.tools.passes.scoring import on_this_device
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.run_files import run_config
from lacuna.tools.trials.crew import CrewSettings
from lacuna.trainer.methods import METHODS
from lacuna.trainer.priors import read_prior
from tests.helpers.benches import bench

EVAL_DATA = os.environ.get("LACUNA_EVAL_DATA")


def quality(out, *options: str) -> tuple[dict, str]:
    return bench("quality", "--out", str(out), *options)


def test_full_labels_beat_an_and_what_is_known_is_not_trained_again(tmp_path):
    report, _ = quality(tmp_path, "--quick")
    rows = report["table"]["features"]
    assert rows["oracle"]["map"] > rows["an"]["map"] + 5, rows
    assert report["ratios"] == {"features.an": 0.0, "features.oracle": 1.0}
    done = {path.name: json.loads(path.read_text()) for path in (tmp_path / "outcomes").iterdir()}
    assert set(done) == {f"features.{method}.{part}.json" for method in ("an", "oracle")
                         for part in ("try-00", "try-01", "seed-0")}
    assert ["test" in found["results"] for _, found in sorted(done.items())] == [True, False, False] * 2
    (tmp_path / "outcomes" / "features.oracle.seed-0.json").unlink()  # as if it had been killed in the last one
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "outcomes").iterdir()}
    again, _ = quality(tmp_path, "--quick")
    assert again["table"] == report["table"]
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())


def test_a_teachers_table(tmp_path):
    """Scores of a classifier on the same labels, where a method that wants such a table looks for them."""
    folder = prepare(os.path.join(generate(str(tmp_path)), "coco_features"), str(tmp_path), 0.2)
    features = FeatureRows(folder, str(tmp_path / "out"), 1, CrewSettings(workers=0))
    taught = features.train("features", ANNOTATIONS["features"], {"vlpl": SINGLE["vlpl"][:1]}, range(1))["vlpl"]
    assert taught.outcomes[0].status == "finished", taught.outcomes[0].reason
    table = state_store.open(run_config(taught.folders[0]).method["scores"])
    teacher = open_trained(str(tmp_path / "out/runs/teacher.single.an/try-00"))
    every = ShardSource.load(os.path.join(folder, "train"), "single", None)
    for shard in range(len(every.index.shards)):
        stored = table.reader(table.snapshots()[-1].name).read_shard("scores", shard)
        scores, facts = on_this_device(teacher, every).scores(shard)
        assert np.array_equal(stored[facts["rows"]], scores.astype(np.float16))


@pytest.mark.long
def test_neighbours_and_priors_are_made_first(tmp_path):
    folder = prepare(os.path.join(generate(str(tmp_path)), "coco_features"), str(tmp_path), 0.2)
    features = FeatureRows(folder, str(tmp_path / "out"), 1, CrewSettings(workers=1))

    def first(name: str, *methods: str) -> dict:
        return {method: ANNOTATIONS[name].trials[method][:1] for method in methods}

    with ray_room(PoolSettings(1)):
        csl = features.train("fpc300", ANNOTATIONS["fpc300"], first("fpc300", "csl_selective", "csl_ignore"), range(1))
        soft = features.train("pos10", ANNOTATIONS["pos10"], first("pos10", "se_i"), range(1))
        means = features.prior(csl["csl_ignore"].folders[0], "fpc300")
    for row in (*csl.values(), *soft.values()):
        assert row.outcomes[0].status == "finished", row.outcomes[0].reason
    path = run_config(csl["csl_selective"].folders[0]).method["prior"]
    source = features.source("fpc300")
    assert np.allclose(read_prior(path, CLASSES, source.index.classes), means)
    trained = open_trained(csl["csl_ignore"].folders[0])
    naive = np.concatenate([on_this_device(trained, source).scores(s)[0] for s in range(len(source.index.shards))])
    assert np.allclose(means, naive.mean(0), atol=1e-6)
    assert run_config(soft["se_i"].folders[0]).method["neighbors"].endswith("neighbors/pos10")


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
    on_photos = {trial["method"]["name"] for trials in PHOTO_SETS["photos"].trials.values()
                 for trial in trials}
    assert {name for name, kind in METHODS.items() if on_vectors(name) and not needs_a_file(kind)} <= tried
    assert {"oracle", "an", "role", "en_cl", "mime"} <= set(ANNOTATIONS["features"].trials)
    assert {"oracle", "an", "selection", "softmax", "role", "en"} <= set(ANNOTATIONS["features_tuned"].trials)
    assert {"an_scl", "en_scl"} <= on_photos
    for name in ("fpc300_tuned", "pos10_tuned"):
        assert {"oracle", "an", "selection"} <= set(ANNOTATIONS[name].trials)
    for name, annotation in ANNOTATIONS.items():
        number = 3 if name == "features_full300" else 8 if annotation.tuned else 6
        assert {len(trials) for trials in annotation.trials.values()} == {number}
    for name, number in (("photos", 4), ("photos_last", 2), ("photos_tuned", 8), ("photos_last_tuned", 8)):
        assert {len(trials) for trials in PHOTO_SETS[name].trials.values()} == {number}


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
    (["--sets", "features", "--methods", "role", "bogus"], "--methods bogus: legal"),
    (["--sets", "fpc300", "--methods", "csl_selective"], "--methods csl_selective needs the prior of csl_ignore"),
])
def test_bad_options_are_named(options, said, tmp_path, capsys):
    assert main(["bench", "quality", "--out", str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not EVAL_DATA, reason="LACUNA_EVAL_DATA is not set: no evaluation data")
def test_published_features_are_what_the_numbers_were_made_with(tmp_path):
    assert EVAL_DATA
    folder = prepare(os.path.join(EVAL_DATA, "coco_features"), str(tmp_path), 0.2)
    train = ShardSource.load(os.path.join(folder, "train"), "labels", "train")
    assert (int(train.counts.sum()), train.classes) == (12_800, 80)
    assert train.subset_counts()[0].sum() / 12_800 == pytest.approx(2.94, abs=0.03)
