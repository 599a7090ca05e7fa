"""`lacuna neighbors`: neighbours as scikit-learn's, medians as numpy's, Soft Exposure trains from it, refusals."""

import json

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.annotate import split_rows
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import features
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.neighbors.making import aligned_features
from lacuna.tools.neighbors.medians import Group, MedianJob, class_distances, plan_groups
from lacuna.tools.neighbors.merging import all_labels, merge, padded
from lacuna.tools.neighbors.searching import SearchJob, exact_search, sample_numbers
from lacuna.tools.neighbors.vectors import VectorReader
from lacuna.tools.passes.pool import PoolSettings, ray_room
from lacuna.trainer import whole_run, world
from lacuna.trainer.assemble import build_run
from lacuna.trainer.config.sections import parse_config

SAMPLES, WIDTH, CLASSES = 230, 24, 9


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Feature shards of uneven sizes; labels depend on the features; a duplicate, a vector of zeros, a broken one."""
    folder = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 1, (CLASSES, WIDTH))
    truth = (rng.random((SAMPLES, CLASSES)) < 0.25).astype(np.int8)
    vectors = (np.abs(truth @ centres + rng.normal(0, 0.5, (SAMPLES, WIDTH))) * 3).astype(np.float32)
    vectors[5], vectors[9], vectors[17] = vectors[4], 0, np.nan
    np.save(folder / "x.npy", vectors)
    np.save(folder / "y.npy", truth)
    url = str(folder / "shards")
    index = pack(features.read(str(folder / "x.npy"), str(folder / "y.npy"), None), url,
                 Layout(streams=1, rows_per_shard=37))
    rows = LabelledRows(index, Sidecar.load(index, "labels"))
    split_rows(rows, ("train", "val"))
    kept = np.where(rng.random(truth.shape) < 0.3, truth, UNKNOWN).astype(np.int8)
    kept[:, 8] = np.where(kept[:, 8] == POSITIVE, UNKNOWN, kept[:, 8])  # a class without positives
    writer = SidecarWriter(index, "partial", UNKNOWN, {})
    for shard in range(len(index.shards)):
        writer.write(shard, SparseLabels.from_dense(kept[index.members(shard).positions]))
    writer.close()
    return url


def dense(source):
    """(vectors [N, D] of length 1, labels [N, L], who takes part) in sample order, from the original arrays."""
    path = source.index.source["features"]
    positions = np.concatenate([source.index.members(s).positions for s in range(len(source.index.shards))])
    vectors = np.load(path)[positions].astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(lengths == 0, 1, lengths)
    labels = np.concatenate([source.sidecar.labels(s).dense(source.classes) for s in range(len(source.index.shards))])
    part = np.ones(len(vectors), bool)
    if source.subset is not None:
        part = np.concatenate([source.subset.mask(s) for s in range(len(source.index.shards))])
    return vectors, labels, part & np.isfinite(vectors).all(axis=1)


def searched(source, k, distance="euclidean", memory=1 << 20):
    work = SearchJob(source, k, distance, memory).build()
    parts = [work(shard) for shard in range(len(source.index.shards))]
    return np.concatenate([p["ids"] for p in parts]), np.concatenate([p["distances"] for p in parts])


@pytest.mark.parametrize("subset", [None, "train"])
@pytest.mark.parametrize("memory", [1, 1 << 20])  # a single shard at a time, or all
def test_neighbors_are_those_of_scikit_learn(dataset, subset, memory, monkeypatch):
    monkeypatch.setattr("lacuna.tools.neighbors.searching._QUERY_ROWS", 7)
    monkeypatch.setattr("lacuna.tools.neighbors.searching._BASE_ROWS", 50)
    source = ShardSource.load(dataset, "partial", subset)
    vectors, _, part = dense(source)
    ids, distances = searched(source, 6, memory=memory)
    own = np.flatnonzero(part)
    oracle = NearestNeighbors(n_neighbors=6, algorithm="brute").fit(vectors[part])
    expected, _ = oracle.kneighbors()  # without points: never the sample itself
    np.testing.assert_allclose(distances[part], expected, atol=2e-6)
    assert (ids[part] != own[:, None]).all()
    assert np.isin(ids[part], own).all()
    found = np.linalg.norm(vectors[ids[part]] - vectors[own][:, None], axis=2)
    np.testing.assert_allclose(distances[part], found, atol=2e-6)  # ids and distances belong together
    assert all(len(set(row)) == 6 for row in ids[part].tolist())
    assert (ids[~part] == -1).all()
    assert np.isinf(distances[~part]).all()


def test_cosine_and_fewer_samples_than_neighbors(dataset):
    source = ShardSource.load(dataset, "partial", None)
    ids, euclidean = searched(source, 3)
    same, cosine = searched(source, 3, "cosine")
    np.testing.assert_array_equal(ids, same)
    np.testing.assert_allclose(cosine, euclidean**2 / 2, rtol=1e-6)
    reader = VectorReader(source, 1 << 20)
    ids, distances = exact_search(reader, 0, [0], sample_numbers(source), 60)
    own = len(reader.shard(0).rows)
    assert ((ids == -1).sum(1) == 60 - (own - 1)).all()
    assert np.isinf(distances[ids == -1]).all()


def test_merged_annotations_equal_a_double_loop(dataset):
    source = ShardSource.load(dataset, "partial", None)
    _, labels, _ = dense(source)
    rng = np.random.default_rng(1)
    neighbors = np.stack([rng.permutation(SAMPLES)[:5] for _ in range(40)])
    neighbors[3, 2:], neighbors[4] = -1, -1
    merged = merge(neighbors, all_labels(source.sidecar), CLASSES)
    wide = padded(merged, CLASSES + 2)
    for n, row in enumerate(neighbors):
        said = {}
        for slot, other in enumerate(row):
            for c in range(CLASSES):
                if other >= 0 and labels[other, c] != UNKNOWN:
                    both = said.setdefault(c, [0, 0])
                    both[0 if labels[other, c] == POSITIVE else 1] |= 1 << slot
        count = len(said)
        assert merged["counts"][n] == count
        assert wide["near_classes"][n].tolist() == sorted(said) + [-1] * (CLASSES + 2 - count)
        for side, name in enumerate(("near_positive", "near_negative")):
            assert wide[name][n].tolist() == [said[c][side] for c in sorted(said)] + [0] * (CLASSES + 2 - count)


@pytest.mark.parametrize("budget", [8 * 60, 40 * WIDTH * 4, 1 << 20])  # columns of a class, a few classes, all of them
def test_medians_equal_numpy(dataset, budget):
    source = ShardSource.load(dataset, "partial", "train")
    vectors, labels, part = dense(source)
    counts = source.subset_counts()[0]
    groups = plan_groups(counts, WIDTH, budget)
    assert sum(len(g.classes) * (g.columns[1] - g.columns[0]) for g in groups) == WIDTH * (counts > 0).sum()
    work = MedianJob(source, counts, groups, 1 << 20).build()
    for number, group in enumerate(groups):
        found = work(number)["medians"]
        for cls, median in zip(group.classes, found, strict=True):
            expected = np.median(vectors[part & (labels[:, cls] == POSITIVE)], axis=0)
            np.testing.assert_allclose(median, expected[slice(*group.columns)], rtol=1e-5, atol=1e-7)


def test_sampled_medians_take_about_as_many_as_asked(dataset):
    source = ShardSource.load(dataset, "partial", None)
    counts = source.sidecar.positives * 100
    job = MedianJob(source, counts, [Group((0,), (0, WIDTH), 0)], 1 << 20, most=1000)
    kept = [job._sampled(np.arange(int(counts[c])), np.full(int(counts[c]), c)).sum() for c in range(8)]
    np.testing.assert_allclose(kept, 1000, atol=120)


def test_class_distances():
    medians = np.array([[0.0, 3.0], [4.0, 0.0], [np.nan, np.nan], [0.0, 1.0]])
    euclidean, cosine = class_distances(medians, "euclidean"), class_distances(medians, "cosine")
    inf = np.inf
    np.testing.assert_allclose(euclidean, [[0, 5, inf, 2], [5, 0, inf, 17**0.5], [inf] * 4, [2, 17**0.5, inf, 0]],
                               rtol=1e-6)
    np.testing.assert_allclose(cosine, [[0, 1, inf, 0], [1, 0, inf, 1], [inf] * 4, [0, 1, inf, 0]], atol=1e-7)


@pytest.mark.long
def test_command_then_training(dataset, tmp_path, capsys, digit_shards):
    """The whole way on Ray: feature shards, then images by a backbone; SE trains for two epochs from the result."""
    out, images = str(tmp_path / "near"), str(tmp_path / "images")
    digits = ShardIndex.load(str(digit_shards / "val"))
    writer = SidecarWriter(digits, "some", UNKNOWN, {})
    full = Sidecar.load(digits, "labels")
    for shard in range(len(digits.shards)):
        labels = full.labels(shard).dense(len(digits.classes))
        labels[:, ::2] = UNKNOWN
        writer.write(shard, SparseLabels.from_dense(labels))
    writer.close()
    with ray_room(PoolSettings(workers=1)):  # both commands use this Ray: a start takes seconds
        assert main(["neighbors", "--shards", dataset, "--labels", "partial", "--subset", "train", "--out", out,
                     "-k", "4", "--json", "--workers", "1"]) == 2  # one of 184 vectors is broken: too many
        assert "1 of 184 vectors cannot be read" in capsys.readouterr().err
        assert main(["neighbors", "--shards", str(digit_shards / "val"), "--labels", "some", "--backbone",
                     "lacuna:tiny", "--weights", "none", "--image-size", "32", "--out", images, "-k", "3",
                     "--json", "--workers", "1"]) == 0
        facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 60
    assert facts["k"] == 3
    made = ShardIndex.load(images + "/features")
    assert made.counts.tolist() == digits.counts.tolist()
    assert made.members(1).keys == digits.members(1).keys
    vectors = VectorReader(ShardSource.load(images + "/features", "some", None), 1 << 20).shard(0).matrix
    assert vectors.shape == (int(digits.counts[0]), 128)
    store = state_store.open(images + "/state")
    ids = store.reader("neighbors").read_shard("neighbor_ids", 0)
    assert ((ids >= 0) & (ids < 60)).all()
    torch.set_num_threads(1)
    joined = world.start(60)
    watchdog = world.Watchdog(joined, 60)
    config = parse_config({
        "name": "se", "run_folder": str(tmp_path), "method": {"name": "se", "neighbors": images},
        "data": {"train": {"url": str(digit_shards / "val"), "labels": "some"},
                 "val": {"url": str(digit_shards / "test")}, "image_size": 32, "streams": 2, "workers": 1},
        "model": {"backbone": "lacuna:tiny"}, "phases": [{"name": "all", "epochs": 2, "batch": 8, "lr": 1e-3}],
    }, "test")
    run = build_run(config, joined, watchdog)
    results = whole_run.train(run)
    watchdog.stop()
    assert 0 < results["val"]["map"] <= 100
    assert run.state.metrics()["state_bytes_written"] == 0
    run.state.close()
    run.run_log.close()


def refused(capsys, *arguments):
    assert main(["neighbors", *arguments]) == 2
    return capsys.readouterr().err


def test_bad_requests_are_named(dataset, tmp_path, capsys, digit_shards):
    out = ("--out", str(tmp_path / "near"))
    partial = ("--shards", dataset, "--labels", "partial", *out)
    assert "every label is known" in refused(capsys, "--shards", dataset, *out)
    assert "-k 0: legal are 1..62" in refused(capsys, *partial, "-k", "0")
    assert "-k 63" in refused(capsys, *partial, "-k", "63")
    assert "holds features already: leave --backbone out" in refused(capsys, *partial, "--backbone", "lacuna:tiny")
    assert "holds images: name the RUN" in refused(capsys, "--shards", str(digit_shards / "val"), *out)
    assert "--median-sample 0" in refused(capsys, *partial, "--median-sample", "0")
    assert "--memory-mb -1" in refused(capsys, *partial, "--memory-mb", "-1")
    assert "no label sidecar named 'other'" in refused(capsys, "--shards", dataset, "--labels", "other", *out)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "neighbors.json").write_text("{}")
    assert "finished result already" in refused(capsys, *partial)
    (tmp_path / "near" / "neighbors.json").unlink()
    try:
        import faiss  # noqa: F401
    except ImportError:
        assert "pip install 'lacuna-trainer[faiss]'" in refused(capsys, *partial, "--search", "ivf")


def test_features_of_other_samples_are_refused(dataset, digit_shards):
    images = ShardSource.load(str(digit_shards / "val"), "labels", None)
    with pytest.raises(UserError, match="not the features of"):
        aligned_features(dataset, images)
