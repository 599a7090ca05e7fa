"""Proves that knowledge-graph truncation verifies root … node of every true path and forgets what lies below."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.annotate import annotate
from lacuna.data_pipelines.annotation.hierarchy import ClassTree, GraphTruncation
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from tests.helpers.labelled_shards import in_original_order, write_dataset

CLASSES = ["animal", "dog", "poodle", "cat", "vehicle", "car", "sports car", "lamp"]
PARENTS = "# child\tparent\ndog\tpet\npet\tanimal\npoodle\tdog\ncat\tpet\ncar\tvehicle\nsports car\tcar\n"
ANIMAL, DOG, POODLE, CAT, VEHICLE, CAR, SPORTS, LAMP = range(8)


def dataset(tmp_path, truth, parents=PARENTS):
    (tmp_path / "parents.tsv").write_text(parents)
    half = len(truth) // 2
    return write_dataset(str(tmp_path / "data"), truth, [half, len(truth) - half], classes=CLASSES)


def run(rows, tmp_path, seed=0):
    return in_original_order(rows.index, annotate(
        rows, f"kg{seed}", "graph", GraphTruncation(seed=seed, parents=str(tmp_path / "parents.tsv"))))


def tree(tmp_path):
    return ClassTree.load(str(tmp_path / "parents.tsv"), dataset(tmp_path, np.zeros((2, 8), np.int8)).index)


def row(*positives):
    labels = np.full(8, NEGATIVE, np.int8)
    labels[list(positives)] = POSITIVE
    return labels


@pytest.mark.parametrize(("pick", "positive", "unknown"), [
    # The path of a poodle: animal, pet (no class), dog, poodle.
    (0.0, [ANIMAL], [DOG, POODLE, CAT]), (0.3, [ANIMAL], [DOG, POODLE, CAT]),
    (0.6, [ANIMAL, DOG], [POODLE]), (0.9, [ANIMAL, DOG, POODLE], [])])
def test_every_place_to_stop_on_one_path(tmp_path, pick, positive, unknown):
    labels = row(ANIMAL, DOG, POODLE)
    tree(tmp_path).truncate(labels, [ANIMAL, DOG, POODLE], np.array([0.0, 0.0, pick]))
    assert np.flatnonzero(labels == POSITIVE).tolist() == positive
    assert np.flatnonzero(labels == UNKNOWN).tolist() == unknown


def test_paths_stop_independently_and_what_one_verified_stays(tmp_path):
    labels = row(ANIMAL, POODLE, CAT, SPORTS)
    # poodle stops at animal, cat goes all the way, the sports car stops at vehicle (positive by implication).
    tree(tmp_path).truncate(labels, [ANIMAL, POODLE, CAT, SPORTS], np.array([0.0, 0.0, 0.99, 0.0]))
    assert np.flatnonzero(labels == POSITIVE).tolist() == [ANIMAL, CAT, VEHICLE]
    assert np.flatnonzero(labels == UNKNOWN).tolist() == [DOG, POODLE, CAR, SPORTS]
    assert labels[LAMP] == NEGATIVE


def test_stops_are_uniform_over_the_path_and_seeded(tmp_path):
    truth = np.tile(row(VEHICLE, CAR, SPORTS, LAMP), (3000, 1))
    rows = dataset(tmp_path, truth)
    found = run(rows, tmp_path)
    depth = (found[:, [VEHICLE, CAR, SPORTS]] == POSITIVE).sum(axis=1)
    assert np.abs(np.bincount(depth, minlength=4)[1:] - 1000).max() < 120
    assert (found[:, LAMP] == POSITIVE).all()
    assert (found[:, [ANIMAL, DOG, POODLE, CAT]] == NEGATIVE).all()
    np.testing.assert_array_equal(found, in_original_order(rows.index, annotate(
        rows, "again", "graph", GraphTruncation(parents=str(tmp_path / "parents.tsv")))))
    assert (found != run(rows, tmp_path, seed=1)).any()


@pytest.mark.parametrize(("parents", "message"), [
    ("dog animal\n", "line 1"), ("dog\tpet\ndog\tanimal\n", "line 2: 'dog' already has another parent"),
    ("dog\tcat\ncat\tdog\n", "circle"), ("hound\tbeast\n", "none of its children is a class"),
    ("dog\tdog\n", "line 1")])
def test_bad_files_are_named(tmp_path, parents, message):
    rows = dataset(tmp_path, np.zeros((4, 8), np.int8), parents)
    with pytest.raises(UserError, match=message):
        run(rows, tmp_path)


def test_missing_file_is_named(tmp_path):
    rows = dataset(tmp_path, np.zeros((4, 8), np.int8))
    for parents, message in (("", "--parents: name a file"), ("nowhere.tsv", "no such file")):
        with pytest.raises(UserError, match=message):
            annotate(rows, "kg", "graph", GraphTruncation(parents=parents))
