"""Calibration: the likeliest rising curve of every class by a general minimiser, rankings kept, ECE as defined."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

from lacuna.tools.eval.calibration import Calibration, Odds, Reliability
from lacuna.tools.eval.measure import Measurement, Piece

SLOPES, OFFSETS = np.array([0.5, 1.0, 2.0, 1.2]), np.array([1.0, -2.0, 0.5, 0.0])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def drawn(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and labels whose log-odds are a line of the scores', class by class."""
    draws = np.random.RandomState(seed)
    odds = draws.randn(rows, len(SLOPES)) * 2 - 1
    labels = draws.rand(*odds.shape) < sigmoid(SLOPES * odds + OFFSETS)
    return sigmoid(odds).astype(np.float32), labels.astype(np.int8)


def fitted(scores: np.ndarray, labels: np.ndarray) -> Calibration:
    odds = Odds(scores.shape[1])
    for rows in np.array_split(np.arange(len(scores)), 3):
        odds.add(scores[rows], labels[rows])
    found = odds.fit()
    assert found is not None
    return found


def test_many_images_give_back_the_true_curves():
    found = fitted(*drawn(40_000))
    np.testing.assert_allclose(found.slopes, SLOPES, rtol=0.06)
    np.testing.assert_allclose(found.offsets, OFFSETS, atol=0.08)


def test_few_images_give_the_minimum_of_the_penalised_likelihood():
    """Every class by scipy on the unbinned scores: near the curve of all classes, as far as its rows carry it away."""
    scores, labels = drawn(300)
    odds = np.log(scores.astype(float) / (1 - scores.astype(float)))

    def minimum(x, y, slope, offset):
        def surprise(curve):
            line = curve[0] * x + curve[1]
            return (np.logaddexp(0, line) - y * line).sum() + ((curve[0] / slope - 1) / 0.25) ** 2 / 2 \
                + (curve[1] - offset) ** 2 / 2
        return scipy.optimize.minimize(surprise, [slope, offset], bounds=[(0.05, None), (None, None)]).x

    shared = minimum(odds.ravel(), labels.ravel(), 1.0, 0.0)
    expected = np.array([minimum(odds[:, c], labels[:, c], *shared) for c in range(len(SLOPES))])
    found = fitted(scores, labels)
    np.testing.assert_allclose(np.stack([found.slopes, found.offsets], 1), expected, atol=0.02)


def test_rankings_stay_and_a_useless_class_does_not_turn_over():
    scores, labels = drawn(500)
    labels[:, 2] = scores[:, 2] < 0.3  # the score says the opposite of the truth
    labels[:, 3] = 0
    found = fitted(scores, labels)
    assert (found.slopes >= 0.05).all()
    assert found.slopes[2] == pytest.approx(0.05)
    given = found(scores)
    for c in range(scores.shape[1]):
        assert (np.diff(given[np.argsort(scores[:, c]), c]) >= 0).all()
    assert given[:, 3].mean() < 0.02
    extreme = found(np.array([[0.0] * 4, [1.0] * 4], np.float32))
    assert np.isfinite(extreme).all()


def test_unknown_labels_give_no_curve():
    scores, labels = drawn(50)
    odds = Odds(4)
    assert odds.fit() is None
    labels[3, 1] = -1
    odds.add(scores, labels)
    assert odds.fit() is None


def naive_error(scores: np.ndarray, labels: np.ndarray) -> float:
    errors = []
    for c in range(scores.shape[1]):
        known, total = labels[:, c] >= 0, 0.0
        for low in range(15):
            here = known & (np.minimum((scores[:, c] * 15).astype(int), 14) == low)
            if here.any():
                total += here.sum() / known.sum() * abs(scores[here, c].mean() - labels[here, c].mean())
        errors.append(total)
    return 100 * float(np.mean(errors))


def test_error_is_the_mean_distance_of_the_bins():
    scores, labels = drawn(400, seed=1)
    labels[:50, 0] = -1
    scores[0, 1] = 1.0
    measured = Reliability(4)
    for rows in np.array_split(np.arange(400), 5):
        measured.add(scores[rows], labels[rows])
    assert measured.error() == pytest.approx(naive_error(scores, labels), rel=1e-5)


def test_eval_names_the_error_before_and_after():
    known, judged = drawn(2_000), drawn(2_000, seed=2)
    calibration = fitted(*known)
    numbers = Measurement(4, calibration=calibration).add_all([Piece(*judged, np.arange(2_000))]).multilabel().numbers
    assert numbers["ece"] == pytest.approx(naive_error(*judged), rel=1e-5)
    assert numbers["ece_calibrated"] == pytest.approx(naive_error(calibration(judged[0]), judged[1]), rel=1e-5)
    assert numbers["ece_calibrated"] < 0.3 * numbers["ece"]
    assert Measurement(4).add_all([Piece(*judged, np.arange(2_000))]).multilabel().numbers["ece_calibrated"] is None
