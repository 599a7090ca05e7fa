"""Proves that simulated annotation follows the published protocols: bit for bit where they fix a random stream."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation import labelled_rows as annotate_rows
from lacuna.data_pipelines.annotation import schemes as annotate_schemes
from lacuna.data_pipelines.annotation.annotate import annotate, keep_rows, places_fingerprint, split_places, split_rows
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows, cut_off
from lacuna.data_pipelines.annotation.schemes import (
    FixedPerClass,
    ImageFraction,
    PositiveFraction,
    RandomPerAnnotation,
    SinglePositive,
)
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from tests.helpers.labelled_shards import in_original_order, mask_in_original_order, write_dataset

SIZES = [70, 1, 0, 64, 65]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks a shard and several compactions, as on a large dataset."""
    monkeypatch.setattr(annotate_rows, "_CHUNK_ENTRIES", 300)
    monkeypatch.setattr(annotate_schemes, "_BUFFERED_ENTRIES", 40)


def random_truth(rows=200, classes=11, unknown=0.0, seed=3):
    parts = [0.2 * (1 - unknown), 0.8 * (1 - unknown), unknown]
    return np.random.default_rng(seed).choice([POSITIVE, NEGATIVE, UNKNOWN], (rows, classes), p=parts).astype(np.int8)


def naive_single_positive(truth, num_pos=1, num_neg=0, seed=1200):
    rng = np.random.RandomState(seed)
    out = np.full_like(truth, UNKNOWN)
    for n, row in enumerate(truth):
        for value, count in ((POSITIVE, num_pos), (NEGATIVE, num_neg)):
            ids = np.nonzero(row == value)[0]
            rng.shuffle(ids)
            out[n, ids if count == -1 else ids[:count]] = value
    return out


def drawn(rows, scheme, name="new"):
    return in_original_order(rows.index, annotate(rows, name, "some", scheme, overwrite=True))


def test_published_label_generation_check(tmp_path):
    truth = np.array([[1 if (n + c) % 3 == 0 or c == n % 7 else 0 for c in range(7)] for n in range(12)], np.int8)
    rows = write_dataset(str(tmp_path), truth, [5, 4, 3])
    found = drawn(rows, SinglePositive())
    assert [np.flatnonzero(row == POSITIVE).tolist() for row in found] == [
        [0], [5], [1], [0], [4], [4], [3], [5], [1], [3], [2], [1]]
    assert not (found == NEGATIVE).any()


@pytest.mark.parametrize(("num_pos", "num_neg"), [(1, 0), (1, 1), (2, 3), (-1, 1), (1, -1), (0, 2)])
@pytest.mark.parametrize(("unlisted", "unknown"), [(NEGATIVE, 0.0), (UNKNOWN, 0.0), (UNKNOWN, 0.5)])
def test_single_positive_equals_the_published_loop(tmp_path, num_pos, num_neg, unlisted, unknown):
    truth = random_truth(unknown=unknown)
    truth[17] = NEGATIVE if unlisted == NEGATIVE else UNKNOWN  # nothing to choose from
    rows = write_dataset(str(tmp_path), truth, SIZES, unlisted)
    found = drawn(rows, SinglePositive(num_pos=num_pos, num_neg=num_neg))
    np.testing.assert_array_equal(found, naive_single_positive(truth, num_pos, num_neg))


def test_published_split_fingerprint():
    train, val = split_places(5717, 0.2, 1200)
    assert val[:8].tolist() == [5, 6, 11, 15, 22, 23, 29, 34]
    assert (int(val.sum()), len(train), len(val)) == (3242061, 4574, 1143)
    assert places_fingerprint(val) == "f5709e6ab75fb71e"


def test_split_subsets_cover_every_row_once_in_the_published_places(tmp_path):
    rows = write_dataset(str(tmp_path), random_truth(), SIZES)
    train, val = split_rows(rows, ("train", "val"))
    expected = np.zeros(200, bool)
    expected[np.random.RandomState(1200).permutation(200)[-40:]] = True
    np.testing.assert_array_equal(mask_in_original_order(rows.index, val), expected)
    np.testing.assert_array_equal(mask_in_original_order(rows.index, train), ~expected)
    assert (train.samples, val.samples) == (160, 40)


def test_image_fraction_inside_a_subset_equals_the_published_subsample(tmp_path):
    truth = random_truth()
    rows = write_dataset(str(tmp_path), truth, SIZES)
    train, _ = split_rows(rows, ("train", "val"))
    inner = LabelledRows(rows.index, rows.sidecar, train)
    places = np.sort(np.random.RandomState(1200).permutation(200)[:160])
    kept = places[np.sort(np.random.RandomState(999).permutation(160)[:16])]
    expected = np.full_like(truth, UNKNOWN)
    expected[kept] = truth[kept]
    scheme = ImageFraction(fraction=0.1)
    np.testing.assert_array_equal(drawn(inner, scheme), expected)
    mask = mask_in_original_order(rows.index, keep_rows(inner, "tenth", scheme))
    np.testing.assert_array_equal(np.flatnonzero(mask), kept)


@pytest.mark.parametrize("per_class", [1, 7, 1000])
def test_fixed_per_class_keeps_exactly_that_many_of_each(tmp_path, per_class):
    truth = random_truth(unknown=0.2)
    rows = write_dataset(str(tmp_path), truth, SIZES, UNKNOWN)
    found = drawn(rows, FixedPerClass(per_class=per_class))
    for value in (POSITIVE, NEGATIVE):
        expected = np.minimum((truth == value).sum(axis=0), per_class)
        np.testing.assert_array_equal((found == value).sum(axis=0), expected)
        assert (truth[found == value] == value).all()


def test_random_per_annotation_drops_the_given_share_of_every_kind(tmp_path):
    truth = random_truth(rows=2000, unknown=0.2)
    rows = write_dataset(str(tmp_path), truth, [1000, 1000], UNKNOWN)
    found = drawn(rows, RandomPerAnnotation(p=0.3))
    assert (found[found != UNKNOWN] == truth[found != UNKNOWN]).all()
    for value in (POSITIVE, NEGATIVE):
        kept, total = (found == value).sum(), (truth == value).sum()
        assert abs(kept - 0.7 * total) < 4 * np.sqrt(0.21 * total)
    assert (drawn(rows, RandomPerAnnotation(p=1.0)) == UNKNOWN).all()
    np.testing.assert_array_equal(drawn(rows, RandomPerAnnotation(p=0.0)), truth)


@pytest.mark.parametrize("negatives", ["image", "dataset"])
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 1.0])
def test_positive_fraction_is_exact_and_negatives_follow(tmp_path, fraction, negatives):
    truth = random_truth()
    rows = write_dataset(str(tmp_path), truth, SIZES)
    found = drawn(rows, PositiveFraction(fraction=fraction, negatives=negatives))
    pos, neg = found == POSITIVE, found == NEGATIVE
    assert (truth[pos] == POSITIVE).all()
    assert (truth[neg] == NEGATIVE).all()
    assert pos.sum() == round(fraction * (truth == POSITIVE).sum())
    if negatives == "dataset":
        assert pos.sum() <= neg.sum() <= round(1.5 * pos.sum())
        return
    room = (truth == NEGATIVE).sum(axis=1)
    np.testing.assert_array_less(np.minimum(pos.sum(axis=1), room) - 1, neg.sum(axis=1))
    np.testing.assert_array_less(neg.sum(axis=1), np.rint(1.5 * pos.sum(axis=1)) + 1)


@pytest.mark.parametrize("scheme", [
    SinglePositive(), RandomPerAnnotation(), FixedPerClass(per_class=5), ImageFraction(), PositiveFraction(),
    PositiveFraction(negatives="dataset")])
def test_draws_depend_on_the_seed_and_not_on_the_shards(tmp_path, scheme):
    truth = random_truth()
    one = write_dataset(str(tmp_path / "one"), truth, SIZES, seed=1)
    other = write_dataset(str(tmp_path / "other"), truth, [100, 100], seed=2)
    np.testing.assert_array_equal(drawn(one, scheme), drawn(other, scheme))
    reseeded = type(scheme)(**{**vars(scheme), "seed": scheme.seed + 1})
    assert (drawn(one, scheme) != drawn(one, reseeded)).any()
    assert annotate(one, "a", "some", scheme).fingerprint == annotate(one, "b", "some", scheme).fingerprint


@pytest.mark.parametrize("scheme", [SinglePositive(num_neg=1), RandomPerAnnotation(), FixedPerClass(), ImageFraction(
    fraction=1.0), PositiveFraction(fraction=1.0)])
def test_rows_outside_the_subset_know_nothing(tmp_path, scheme):
    rows = write_dataset(str(tmp_path), random_truth(), SIZES)
    train, val = split_rows(rows, ("train", "val"))
    found = drawn(LabelledRows(rows.index, rows.sidecar, train), scheme)
    assert (found[mask_in_original_order(rows.index, val)] == UNKNOWN).all()
    assert (found[mask_in_original_order(rows.index, train)] != UNKNOWN).any()


def test_sidecar_records_its_origin_and_counts(tmp_path):
    truth = random_truth()
    rows = write_dataset(str(tmp_path), truth, SIZES)
    annotate(rows, "single", "single_positive", SinglePositive())
    source = Sidecar.load(rows.index, "single").source
    assert (source["scheme"], source["seed"], source["from"]) == ("single_positive", 1200, "labels")
    assert source["from_fingerprint"] == rows.sidecar.fingerprint
    assert source["counts"]["positives"] == (truth == POSITIVE).any(axis=1).sum()
    assert source["counts"]["positives_before"] == (truth == POSITIVE).sum()


@pytest.mark.parametrize("count", [0, 1, 500, 999, 1000])
def test_cut_off_is_the_exact_kth_smallest(count):
    hashes = np.random.default_rng(0).integers(0, 1 << 63, 1000, dtype=np.uint64)
    hashes[:400] >>= np.uint64(20)  # crowds one bin
    cut, found = cut_off(lambda: np.array_split(hashes, 7), lambda total: count if total == 1000 else -1)
    assert (found, int((hashes < cut).sum())) == (count, count)


@pytest.mark.parametrize(("scheme", "message"), [
    (SinglePositive(num_pos=-2), "--num-pos -2"), (RandomPerAnnotation(p=1.5), "--p 1.5"),
    (FixedPerClass(per_class=0), "--per-class 0"), (ImageFraction(fraction=10), "--fraction 10"),
    (PositiveFraction(negatives="all"), "--negatives 'all'")])
def test_bad_options_are_named(tmp_path, scheme, message):
    rows = write_dataset(str(tmp_path), random_truth(), SIZES)
    with pytest.raises(UserError, match=message):
        annotate(rows, "new", "some", scheme)
    with pytest.raises(UserError, match="taken from"):
        annotate(rows, "labels", "some", scheme)
    with pytest.raises(UserError, match=r"--fraction 0\.0"):
        split_rows(rows, ("train", "val"), fraction=0.0)
