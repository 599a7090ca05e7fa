"""Proves that each kind of finding equals a plain search, and that small sets with a known fault show it."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.tools.audit.labels import class_levels, confused, doubtful, too_few
from lacuna.tools.audit.likeness import nearest, outliers, twins


def test_doubtful_entries_are_those_beyond_the_other_kinds_mean():
    rng = np.random.default_rng(0)
    labels = rng.choice([POSITIVE, NEGATIVE, UNKNOWN], (80, 5), p=[0.3, 0.4, 0.3]).astype(np.int8)
    labels[:, 4] = np.where(labels[:, 4] == NEGATIVE, UNKNOWN, labels[:, 4])  # no negative: nothing to compare with
    beliefs = np.clip(0.3 * (labels == POSITIVE) + 0.7 * rng.random((80, 5)), 0, 1)
    high, low = class_levels(beliefs, labels)
    expected = {}
    for i in range(80):
        for c in range(4):
            positives, negatives = beliefs[labels[:, c] == POSITIVE, c], beliefs[labels[:, c] == NEGATIVE, c]
            if labels[i, c] == POSITIVE and beliefs[i, c] <= negatives.mean():
                expected[i, c] = 1 - beliefs[i, c]
            if labels[i, c] == NEGATIVE and beliefs[i, c] >= positives.mean():
                expected[i, c] = beliefs[i, c]
    rows, classes, doubts = doubtful(beliefs, labels)
    found = dict(zip(zip(rows.tolist(), classes.tolist(), strict=True), doubts, strict=True))
    assert found == pytest.approx(expected)
    assert len(expected) > 5
    assert np.all(np.diff(doubts) <= 0)
    assert np.isnan(low[4])
    assert not np.isnan(high[4])


def test_confused_classes_equal_counting():
    rng = np.random.default_rng(1)
    labels = (rng.random((200, 4)) < 0.4).astype(np.int8)
    beliefs = 0.5 * labels + 0.5 * rng.random((200, 4))
    beliefs[labels[:, 0] == POSITIVE, 1] = 0.99  # where 0 is there, 1 is believed
    found = {(a, b): (share, n) for a, b, share, n in confused(beliefs, labels, 0.5)}
    at = (labels[:, 0] == POSITIVE) & (labels[:, 1] == NEGATIVE)
    assert found[0, 1] == (pytest.approx((beliefs[at, 1] > beliefs[at, 0]).mean()), int(at.sum()))
    assert (2, 3) not in found
    assert confused(beliefs[:5], labels[:5], 0.5) == [], "five samples say nothing"


def test_too_few():
    assert too_few(np.array([5, 100, 0, 19, 20]), 20) == [(2, 0), (0, 5), (3, 19)]


@pytest.mark.parametrize("same", [True, False])
def test_nearest_equals_all_distances(same):
    rng = np.random.default_rng(2)
    base = rng.normal(size=(1300, 7)).astype(np.float32)
    base /= np.linalg.norm(base, axis=1, keepdims=True)
    queries = base if same else base[:40] + 0.01
    places, distances = nearest(queries, base, 3, same)
    every = np.linalg.norm(queries[:, None].astype(np.float64) - base[None], axis=2)
    if same:
        np.fill_diagonal(every, np.inf)
    np.testing.assert_allclose(distances, np.sort(every, axis=1)[:, :3], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(every, places, 1), distances, atol=1e-5)


def test_twins_and_outliers():
    distances = np.full((100, 2), 0.5) + np.linspace(0, 0.01, 100)[:, None]
    distances[7] = [0.001, 0.5]
    distances[42] = [3.0, 3.0]
    places = np.zeros((100, 2), np.int64)
    places[7, 0] = 9
    assert twins(places, distances, 0.05) == [(7, 9, 0.001)]
    rows, away = outliers(distances, 8.0)
    assert rows.tolist() == [42]
    assert away[0] > 100
