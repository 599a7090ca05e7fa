"""Proves that promised precision is tested exactly, in an order that keeps the promise, and holds where sets differ."""

from __future__ import annotations

from math import comb, floor

import numpy as np
import pytest

from lacuna.tools.suggest.promise import (
    Answers,
    Evidence,
    best_case,
    contradicted,
    estimated_precision,
    judge,
    level,
    p_values,
    right_at_least,
    starts,
    thresholds,
)


def naive_tail(seen: int, total: int, marked: int, drawn: int) -> float:
    """P(at most `seen` of the marked ones are among those drawn)."""
    return sum(comb(marked, i) * comb(total - marked, drawn - i) for i in range(seen + 1)) / comb(total, drawn)


def naive_p(evidence: Evidence, limit: float, precision: float, least: int = 0) -> float:
    answers = list(zip(evidence.answers.scores, evidence.answers.right, evidence.answers.drawn, strict=True))
    above = [a for a in answers if a[0] >= limit]
    size = sum(score >= limit for score in evidence.unknown)
    undecided = size - len(above)
    if undecided == 0:
        return 1.0
    wrong = floor((1 - precision) * undecided + 1e-9) + 1 + sum(not right for _, right, _ in above)
    found = []
    if evidence.negatives is not None:
        seen = sum(score >= limit for score in evidence.negatives)
        total = len(evidence.negatives) + evidence.entries - (0 if evidence.pool else max(size - wrong, least))
        found.append(naive_tail(seen, total, min(seen + wrong, total), len(evidence.negatives)))
    if any(drawn for *_, drawn in answers):
        lot = [a for a in above if a[2]]
        others = [a for a in above if not a[2]]
        bad = wrong - sum(not right for _, right, _ in others)
        found.append(naive_tail(sum(not right for _, right, _ in lot), size - len(others),
                                min(bad, size - len(others)), len(lot)))
    return min(1.0, len(found) * min(found))


def some_evidence(seed: int, answers: bool = False, pool: bool = False, negatives: bool = True) -> Evidence:
    rng = np.random.default_rng(seed)
    unknown = np.concatenate([rng.normal(1.5, 1, 120), rng.normal(-1, 1, 300)]).round(1).astype(np.float32)
    given = Answers()
    if answers:
        at = rng.permutation(100)[:30]
        unknown = -np.sort(-unknown)
        given = Answers(unknown[at], rng.random(30) < 0.8, rng.random(30) < 0.5)
    known = rng.normal(-1, 1, 90).round(1).astype(np.float32) if negatives else None
    return Evidence(-np.sort(-unknown), len(unknown), known, given, pool)


@pytest.mark.parametrize("kind", [{}, {"answers": True}, {"pool": True}, {"answers": True, "negatives": False}])
def test_p_values_equal_counting(kind):
    evidence = some_evidence(1, **kind)
    limits = np.unique(evidence.unknown)[::-1]
    for precision in (0.5, 0.9):
        found = p_values(evidence, limits, precision, floor=40)
        expected = [naive_p(evidence, limit, precision, 40) for limit in limits]
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_sequence_is_fixed_and_ends_at_the_first_failure():
    evidence = some_evidence(2)
    limits = thresholds(evidence, 0.5, 0.05)
    other = Evidence(evidence.unknown, evidence.entries, evidence.negatives[::-1] + 1)
    np.testing.assert_array_equal(limits, thresholds(other, 0.5, 0.05), "labels of validation play no part in it")
    assert np.all(np.diff(limits) < 0)
    assert np.all(best_case(evidence, limits, 0.5) <= level(0.05))
    passed = p_values(evidence, limits, 0.5, right_at_least(evidence, 0.05 * 0.1)) <= level(0.05)
    sizes = [int((evidence.unknown >= limit).sum()) for limit in limits]
    reached = [-1]
    for start in starts(np.array(sizes)):
        for at in range(start, len(limits)):
            if not passed[at]:
                break
            reached.append(at)
    verdict = judge(evidence, 0.5, 0.05)
    assert max(reached) >= 0
    assert verdict.threshold == pytest.approx(float(limits[max(reached)]))
    assert verdict.entries == sizes[max(reached)]
    few = judge(evidence, 0.5, 0.05, most=sizes[0])
    assert few.entries <= sizes[0], "a limit on their number is a limit on the thresholds: a part has no promise"


def draw(rng: np.random.Generator, positives: int, negatives: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    return (np.concatenate([rng.normal(shift, 1, positives), rng.normal(0, 1, negatives)]),
            np.repeat([True, False], [positives, negatives]))


def naive_choice(scores: np.ndarray, truth: np.ndarray, precision: float) -> float:
    """What one would do without a promise: the lowest score at which the validation set itself is precise enough."""
    order = np.argsort(-scores)
    share = np.cumsum(truth[order]) / np.arange(1, len(order) + 1)
    kept = np.flatnonzero(share >= precision)
    return scores[order][kept[-1]] if len(kept) else np.inf


def test_the_promise_holds_where_positives_are_rarer_and_harder():
    """Positives half as frequent and closer to the negatives than in validation: 200 draws, delta 0.1."""
    rng = np.random.default_rng(7)
    short = naive_short = made = 0
    for _ in range(200):
        val_scores, val_truth = draw(rng, 500, 2000, 3.0)
        scores, truth = draw(rng, 250, 2250, 2.5)
        evidence = Evidence(-np.sort(-scores), len(scores), val_scores[~val_truth])
        limit = judge(evidence, 0.7, 0.1).threshold
        taken = scores >= limit
        made += bool(taken.any())
        short += bool(taken.any() and truth[taken].mean() < 0.7)
        taken = scores >= naive_choice(val_scores, val_truth, 0.7)
        naive_short += bool(taken.any() and truth[taken].mean() < 0.7)
    assert made >= 100, "and it is not kept by saying nothing"
    assert short <= 200 * 0.1 + 3 * np.sqrt(200 * 0.1 * 0.9)
    assert naive_short >= 190, "the set is one on which the plain rule fails"


def test_the_floor_of_positives_holds():
    rng = np.random.default_rng(8)
    wrong, found = 0, []
    for _ in range(200):
        scores, _ = draw(rng, 400, 400, 2.5)
        found.append(right_at_least(Evidence(-np.sort(-scores), 800, rng.normal(0, 1, 300)), 0.1))
        wrong += found[-1] > 400
    assert wrong <= 200 * 0.1 + 3 * np.sqrt(200 * 0.1 * 0.9)
    assert np.mean(found) > 150


def test_answers_by_lot_promise_without_validation():
    scores = np.linspace(1, 0, 1000).astype(np.float32)
    at = np.random.default_rng(0).permutation(400)[:60]
    all_right = Answers(scores[at], np.ones(60, bool), np.ones(60, bool))
    assert judge(Evidence(scores, 1000, None, all_right), 0.8, 0.05).entries > 100
    chosen = Answers(scores[at], np.ones(60, bool), np.zeros(60, bool))
    assert judge(Evidence(scores, 1000, None, chosen), 0.8, 0.05).entries == 0, "chosen by a person is not by lot"
    bad = Answers(scores[at], np.arange(60) % 2 == 0, np.ones(60, bool))
    assert judge(Evidence(scores, 1000, None, bad), 0.8, 0.05).entries == 0


def test_rejections_take_a_promise_back():
    scores = np.linspace(1, 0, 1000).astype(np.float32)
    evidence = Evidence(scores, 1000, np.zeros(500, np.float32))
    assert judge(evidence, 0.8, 0.05).entries > 500
    refused = Answers(scores[:20], np.arange(20) % 2 == 0, np.zeros(20, bool))
    against = Evidence(scores, 1000, np.zeros(500, np.float32), refused)
    assert contradicted(against, scores[19:20], 0.8, 0.05)[0]
    assert judge(against, 0.8, 0.05).entries == 0


def test_the_estimate_solves_its_equation():
    evidence = some_evidence(3)
    scores = np.array([0.5, 1.0, 2.0], np.float32)
    found = estimated_precision(evidence, scores)
    for score, right in zip(scores, found, strict=True):
        size = (evidence.unknown >= score).sum()
        rate = (evidence.negatives >= score).mean()
        assert 0 < right <= 1
        assert (evidence.entries - size * right) * rate == pytest.approx(size * (1 - right), abs=0.5)
