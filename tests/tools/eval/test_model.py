"""Proves that evaluation on Ray gives scikit-learn's numbers on any number of workers, and the mean scores as prior."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, f1_score

from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.pool import PoolSettings, ray_room
from lacuna.tools.passes.scoring import ScoreJob, shard_rows
from lacuna.tools.passes.trained import open_trained
from lacuna.trainer.priors import read_prior


@pytest.fixture(scope="module", autouse=True)
def _ray():
    with ray_room(PoolSettings(workers=2)):
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """Part files that the tests share: what one has scored, the next one need not."""
    return tmp_path_factory.mktemp("parts")


def call(capsys, *flags: str) -> dict:
    code = main([*flags, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def scored(run: str, url: str, folder: Path, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """(scores, targets) of all rows, from the parts that a command left."""
    source = ShardSource.load(url, labels, None)
    parts = Parts(str(folder), ScoreJob(open_trained(run), source).fingerprint)
    found = list(parts.read_all(list(shard_rows(source))))
    targets = [source.sidecar.labels(s).dense(source.classes, part["rows"]) for s, part in found]
    return np.concatenate([part["scores"] for _, part in found]), np.concatenate(targets)


def test_multilabel(trained, kept, tmp_path, capsys):
    test, val = str(trained.data / "test"), str(trained.data / "val")
    flags = ["eval", trained.full, "--shards", test, "--protocol", "multilabel"]
    found = call(capsys, *flags, "--val", val, "--thresholds-out", str(tmp_path / "thresholds.json"),
                 "--csv", str(tmp_path / "classes.csv"), "--parts", str(kept))
    scores, targets = scored(trained.full, test, kept)
    ap = [average_precision_score(targets[:, c], scores[:, c]) for c in range(10)]
    assert found["map"] == pytest.approx(100 * np.mean(ap), abs=1e-9)
    assert found["map_skip_empty_classes"] == 10
    few = targets.sum(axis=1) == 2
    there = [c for c in range(10) if targets[few, c].any()]
    ap_few = [average_precision_score(targets[few, c], scores[few, c]) for c in there]
    assert found["map_k2_skip_empty"] == pytest.approx(100 * np.mean(ap_few), abs=1e-9)
    assert found["map_k2"] == pytest.approx(10 * np.sum(ap_few), abs=1e-9)
    # mF1: thresholds that are best on val, tried one by one, then applied to test.
    val_scores, val_targets = scored(trained.full, val, kept)
    best = [max((f1_score(val_targets[:, c], val_scores[:, c] >= t), t) for t in val_scores[:, c]) for c in range(10)]
    expected = [f1_score(targets[:, c], scores[:, c] >= t) for c, (_, t) in enumerate(best)]
    assert found["mf1"] == pytest.approx(100 * np.mean(expected), abs=1e-9)
    kept = json.loads((tmp_path / "thresholds.json").read_text())["classes"]
    assert [entry["name"] for entry in kept] == [str(c) for c in range(10)]
    assert [entry["threshold"] for entry in kept] == [float(t) for _, t in best]
    with open(tmp_path / "classes.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["ap"]) for row in rows] == pytest.approx(ap, abs=1e-12)
    assert [float(row["f1"]) for row in rows] == pytest.approx(expected, abs=1e-12)
    # The loop's own evaluation batches differently, so only nearly the same.
    assert found["map"] == pytest.approx(json.loads((Path(trained.full) / "results.json").read_text())["test"]["map"],
                                         abs=0.01)
    again = call(capsys, *flags, "--thresholds", str(tmp_path / "thresholds.json"), "--workers", "1")
    different = {k for k in found if found[k] != again.get(k)}
    assert different == {"thresholds_from", "ece_calibrated"}  # one worker or two, kept parts or new: the same bits
    assert again["ece_calibrated"] is None  # a calibration is fitted on val, which was not given
    assert not list((Path(trained.full) / "passes").iterdir())  # nothing is left behind where nobody asked for it


def test_openimages_protocol(trained, kept, capsys):
    """Verified labels only; the oracle is a loop over classes."""
    url = str(trained.data / "test")
    index = ShardIndex.load(url)
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "some", "rpa", SCHEMES["rpa"](seed=1))
    found = call(capsys, "eval", trained.full, "--shards", url, "--labels", "some", "--protocol", "openimages",
                 "--group-by", str(trained.data / "train"), "--parts", str(kept))
    scores, targets = scored(trained.full, url, kept, "some")
    ap = np.array([average_precision_score(targets[known, c] == POSITIVE, scores[known, c])
                   for c, known in enumerate((targets != UNKNOWN).T)])
    positives = (targets == POSITIVE).sum(axis=0)
    assert found["map_c"] == pytest.approx(100 * ap.mean(), abs=1e-9)
    assert found["map_o"] == pytest.approx(100 * (ap * positives).sum() / positives.sum(), abs=1e-9)
    order = np.argsort(Sidecar.load(ShardIndex.load(str(trained.data / "train")), "labels").positives, kind="stable")
    assert found["map_group1"] == pytest.approx(100 * ap[order[:2]].mean(), abs=1e-9)
    assert main(["eval", trained.full, "--shards", url, "--labels", "some", "--protocol", "multilabel"]) == 2
    assert "leaves labels unknown" in capsys.readouterr().err


def test_real_protocol_on_shards(trained, kept, tmp_path, capsys):
    """Labels come from real.json by validation number, wherever the shuffle put the image."""
    scenes = digits.read(48, "test", scene_seed=7)
    samples = [dataclasses.replace(s, key=f"n0/ILSVRC2012_val_{i:08d}") for i, s in enumerate(scenes.samples, 1)]
    pack(dataclasses.replace(scenes, samples=samples), str(tmp_path / "val"), Layout(streams=1, rows_per_shard=20))
    truth = scenes.labels.dense(10) == POSITIVE
    truth[::9] = False
    originals = scenes.labels.dense(10).argmax(axis=1)
    (tmp_path / "real.json").write_text(json.dumps([np.flatnonzero(row).tolist() for row in truth]))
    (tmp_path / "val_labels.txt").write_text("".join(f"{i}\n" for i in originals))
    flags = ["eval", trained.full, "--shards", str(tmp_path / "val"), "--protocol", "real", "--real",
             str(tmp_path / "real.json"), "--parts", str(kept)]
    found = call(capsys, *flags, "--val-labels", str(tmp_path / "val_labels.txt"))
    scores, _ = scored(trained.full, str(tmp_path / "val"), kept)
    index = ShardIndex.load(str(tmp_path / "val"))
    numbers = np.array([int(key[-8:]) - 1 for s in range(len(index.shards)) for key in index.members(s).keys])
    truth, originals = truth[numbers], originals[numbers]
    some = truth.any(axis=1)
    assert (numbers != np.arange(48)).any()
    assert found["top1"] == pytest.approx(100 * np.mean(scores.argmax(axis=1) == originals))
    assert found["real_top1"] == pytest.approx(100 * truth[some, scores[some].argmax(axis=1)].mean())
    ap = [average_precision_score(truth[some, c], scores[some, c]) for c in range(10)]
    assert found["map"] == pytest.approx(100 * np.mean(ap), abs=1e-9)
    assert call(capsys, *flags)["top1"] is None  # without the original labels there is no original top-1
    assert main([*flags[:3], str(trained.data / "val"), *flags[4:]]) == 2
    assert "is none of the 48 ImageNet validation images" in capsys.readouterr().err


def test_label_map_is_checked(trained, tmp_path, capsys):
    shutil.copytree(trained.data / "test", tmp_path / "test")
    body = json.loads((tmp_path / "test" / "index.json").read_text())
    names = body["classes"]
    swapped = ShardIndex.load(str(tmp_path / "test"))
    swapped = dataclasses.replace(swapped, classes=[names[1], names[0], *names[2:]])
    swapped.save()
    sidecar = tmp_path / "test" / "labels" / "labels.json"
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "index_fingerprint": swapped.fingerprint}))
    assert main(["eval", trained.full, "--shards", str(tmp_path / "test"), "--protocol", "multilabel"]) == 2
    assert "class 0 is '1', the model's is '0'" in capsys.readouterr().err


def test_prior(trained, tmp_path, capsys):
    """The mean score of every class over the run's own training set; ranks compared with the true frequencies."""
    found = call(capsys, "prior", trained.scl, "--full-labels", "labels", "--out", str(tmp_path / "prior"))
    source = ShardSource.load(str(trained.data / "train"), "labels", None)
    here = ScoreJob(open_trained(trained.scl), source).build()
    scores = np.concatenate([here(shard)["scores"] for shard in shard_rows(source)])
    full = np.concatenate([source.sidecar.labels(shard).dense(10) for shard in shard_rows(source)])
    single = Sidecar.load(ShardIndex.load(str(trained.data / "train")), "single").positives / len(scores)
    names = [str(c) for c in range(10)]
    for ending in ("csv", "json"):
        prior = read_prior(str(tmp_path / f"prior.{ending}"), 10, names)
        assert prior == pytest.approx(scores.mean(axis=0, dtype=np.float64), abs=1e-12)
    body = json.loads((tmp_path / "prior.json").read_text())
    assert body["naive_prior"] == pytest.approx(single.tolist())
    assert body["true_frequency"] == pytest.approx(full.mean(axis=0).tolist())
    assert found["spearman"] == pytest.approx(spearmanr(prior, full.mean(axis=0)).statistic)
    assert found["spearman_naive"] == pytest.approx(spearmanr(single, full.mean(axis=0)).statistic)
    assert main(["prior", trained.scl, "--full-labels", "single"]) == 2
    assert "leaves labels unknown" in capsys.readouterr().err
