"""Proves that lacuna.average_precision equals scikit-learn's for any float type, unknown labels left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

import lacuna


def case(dtype, decimals: int | None = None, rows: int = 200, classes: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    scores = rng.random((rows, classes))
    if decimals is not None:
        scores = scores.round(decimals)
    labels = rng.choice([1, 0, -1], (rows, classes), p=[0.2, 0.5, 0.3]).astype(np.int8)
    labels[:, -1] = np.minimum(labels[:, -1], 0)  # a class without positives
    return scores.astype(dtype), labels


def expected(scores: np.ndarray, labels: np.ndarray) -> list[float]:
    out = []
    for cls in range(scores.shape[1]):
        known = labels[:, cls] >= 0
        hit = labels[known, cls] == 1
        out.append(average_precision_score(hit, scores[known, cls]) if hit.any() else np.nan)
    return out


@pytest.mark.parametrize("decimals", [None, 1])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_equals_scikit_learn(dtype, decimals):
    scores, labels = case(dtype, decimals)
    result = lacuna.average_precision(scores, labels)
    np.testing.assert_allclose(result.ap, expected(scores, labels), rtol=0, atol=1e-12)
    assert result.summary()["map_skip_empty"] == pytest.approx(100 * np.nanmean(result.ap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_are_taken_as_they_are(dtype):
    scores, labels = case(np.float64)
    tensor = torch.from_numpy(scores).to(dtype).requires_grad_()
    result = lacuna.average_precision(tensor, torch.from_numpy(labels))
    np.testing.assert_allclose(result.ap, expected(tensor.detach().double().numpy(), labels), rtol=0, atol=1e-12)


def test_float64_scores_that_float32_would_tie_stay_apart():
    """Eight scores within one float32 step: rounding would make one tie of them, with precision 1/4."""
    scores = 0.5 + np.arange(8)[:, None] * 1e-12
    labels = np.array([0, 0, 0, 0, 0, 0, 1, 1], bool)[:, None]
    assert len(np.unique(scores.astype(np.float32))) == 1
    result = lacuna.average_precision(scores, labels)
    assert result.ap.tolist() == [1.0]
    assert result.summary()["map_asl"] == pytest.approx(100.0)
    assert result.thresholds[0] == scores[6, 0]  # predicting at least this is exactly right


def test_wide_and_narrow_floats_agree_in_every_measure():
    scores, labels = case(np.float32, 2)
    narrow, wide = (lacuna.average_precision(s, labels) for s in (scores, scores.astype(np.float64)))
    np.testing.assert_array_equal(narrow.classes.to_matrix(), wide.classes.to_matrix())
    np.testing.assert_equal(narrow.summary(), wide.summary())


@pytest.mark.parametrize("kind", [bool, np.int8, np.int64, np.uint8])
def test_full_labels_may_be_booleans_or_any_integers(kind):
    scores, labels = case(np.float64)
    full = labels == 1
    result = lacuna.average_precision(scores, full.astype(kind))
    np.testing.assert_allclose(result.ap, expected(scores, full.astype(np.int8)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("scores", "labels", "message"), [
    (np.zeros((2, 3)), np.full((2, 3), 2), "labels hold 2; legal: 1 positive, 0 negative, -1 unknown"),
    (np.zeros((2, 3)), np.zeros((2, 3), np.float32), "labels are float32"),
    (np.zeros((2, 3), int), np.zeros((2, 3), bool), "scores are int64"),
    (np.zeros(3), np.zeros(3, bool), "two matrices"),
    (np.full((2, 3), np.nan), np.zeros((2, 3), bool), "NaN"),
])
def test_bad_input_is_named(scores, labels, message):
    with pytest.raises(lacuna.UserError, match=message):
        lacuna.average_precision(scores, labels)
