"""Proves that every score of questions, and the batch made of them, equals a slow recomputation from scratch."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.tools.select.scores import LEAST_NOVELTY, need, share_out, spread, uncertainty


def test_uncertainty_is_highest_in_the_middle():
    beliefs = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(uncertainty(beliefs), [0, 0.5, 1, 0.5, 0])


def test_need_falls_with_positives():
    assert need(0, 10) == 1
    assert need(10, 10) == pytest.approx(1 / np.sqrt(2))
    assert need(0, 0) == 1


def unit_vectors(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    vectors = rng.normal(size=(count, width))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def naive_spread(beliefs: np.ndarray, vectors: np.ndarray, most: int) -> tuple[list[int], list[float]]:
    """Before every choice, each candidate is compared with all chosen ones anew."""
    order: list[int] = []
    worth: list[float] = []
    while len(order) < most:
        options = []
        for i in range(len(beliefs)):
            near = max([max(0.0, float(vectors[i] @ vectors[j])) for j in order], default=0.0)
            if i not in order and 1 - near >= LEAST_NOVELTY:
                options.append((beliefs[i] * (1 - near), -i))
        if not options:
            break
        best, at = max(options)
        order.append(-at)
        worth.append(best)
    return order, worth


@pytest.mark.parametrize("seed", range(4))
def test_a_spread_equals_comparing_anew(seed):
    rng = np.random.default_rng(seed)
    vectors = unit_vectors(rng, 40, 6)
    vectors[20:25] = vectors[3]  # near-duplicates
    beliefs = rng.random(40)
    order, worth = spread(beliefs, vectors, 30)
    expected, values = naive_spread(beliefs, vectors, 30)
    assert order.tolist() == expected
    np.testing.assert_allclose(worth, values)
    assert len({3, *range(20, 25)} & set(order.tolist())) == 1, "of six equal images one is asked about"


def naive_share(worths: list[np.ndarray], beliefs: list[np.ndarray], positives: np.ndarray,
                budget: int) -> list[tuple[int, int]]:
    chosen: list[tuple[int, int]] = []
    typical = np.median(positives)
    while len(chosen) < budget:
        options = []
        for cls in range(len(worths)):
            asked = [place for c, place in chosen if c == cls]
            if len(asked) < len(worths[cls]):
                have = positives[cls] + sum(beliefs[cls][place] for place in asked)
                options.append((worths[cls][len(asked)] / np.sqrt(1 + have / max(typical, 1)), -cls, len(asked)))
        if not options:
            break
        _, cls, place = max(options)
        chosen.append((-cls, place))
    return chosen


def test_a_batch_equals_choosing_one_after_the_other():
    rng = np.random.default_rng(5)
    positives = np.array([0, 5, 50, 500])
    beliefs = [rng.random(n) for n in (10, 20, 20, 20)]
    worths = [np.sort(b * rng.random(len(b)))[::-1] for b in beliefs]
    for budget in (1, 13, 100):
        assert share_out(worths, beliefs, positives, budget) == naive_share(worths, beliefs, positives, budget)


def test_a_class_with_few_positives_is_asked_more():
    equal = [np.full(50, 0.5)] * 2
    chosen = share_out(equal, equal, np.array([1, 1000]), 40)
    assert sum(cls == 0 for cls, _ in chosen) > 30
