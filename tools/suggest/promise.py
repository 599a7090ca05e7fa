"""What can be promised about suggestions: tests of "of these entries, at least a share `precision` is right".

A suggestion is wrong when a negative entry reaches the threshold. Validation images show how often negatives do that,
and nothing else is taken from them: how many unknown entries of the training set reach it is counted, not estimated.
So neither the frequency of a class nor how hard its unannotated positives are has to be the same in both sets, which
they are not. What must hold: a negative of the training set reaches a score no more often than one of the validation
set. Given that, of k wrong entries in validation and m in training, k is hypergeometric, and the p-value is exact.

Thresholds are tried in a fixed order that no label decides, from a few starts downwards, each until its first failure
(fixed sequence testing): trying many costs no more than a share of delta per start.
Legend: M entries of a class at or above a threshold, N unknown entries of the class, n negatives in validation.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

import numpy as np
import scipy  # its statistics are imported when they are first used: half a second

_FLOOR_SHARE = 0.1  # of delta, for how many positives there are at least
_FLOOR_SIZES = 6  # thresholds at which that is looked at
_STARTS = 3  # each gets this part of delta; from the second on a wrong entry or two at the top does no harm
_START_FACTOR = 2.5  # between the sizes of two starts
_STEP = 1.1  # between the sizes of two thresholds
_LEAST = 5  # entries that are worth a threshold


@dataclass(frozen=True)
class Answers:
    """Fresh labels of entries of one class: what people decided about unknown entries of the training set."""

    scores: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    right: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    drawn: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # by lot among all entries above their score


@dataclass(frozen=True)
class Evidence:
    """Everything that is known about one class (or a pool of classes, by images)."""

    unknown: np.ndarray  # float32, falling: the highest scores of unknown entries; decided ones are among them
    entries: int  # N
    negatives: np.ndarray | None  # float32 [n], scores of validation negatives; None: no validation set
    answers: Answers = field(default_factory=Answers)
    pool: bool = False  # N and n are images, scores are the highest of an image's entries


@dataclass(frozen=True)
class Verdict:
    threshold: float = np.inf
    entries: int = 0  # undecided ones at or above it


def thresholds(evidence: Evidence, precision: float, delta: float, most: int | None = None) -> np.ndarray:
    """Falling scores to try: from the first that would pass if validation had no wrong entry at all."""
    scores = evidence.unknown
    if not len(scores):
        return np.zeros(0, np.float32)
    sizes = [_LEAST]
    while sizes[-1] < len(scores):
        sizes.append(max(sizes[-1] + 1, int(sizes[-1] * _STEP)))
    # A threshold takes everything tied with it. The list of highest scores may be cut inside a tie at its end.
    limits = np.unique(scores[np.minimum(sizes, len(scores)) - 1])[::-1]
    if len(scores) < evidence.entries:
        limits = limits[limits > scores[-1]]
    if most is not None:
        limits = limits[_reached(scores, limits) - reached_answers(evidence.answers.scores, limits) <= most]
    return limits[best_case(evidence, limits, precision) <= level(delta)]


def level(delta: float) -> float:
    """What a single test may risk."""
    return delta * (1 - _FLOOR_SHARE) / _STARTS


def _reached(falling: np.ndarray, limits: np.ndarray) -> np.ndarray:
    return np.searchsorted(-falling, -limits, "right")


def reached_answers(scores: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """How many of the scores, in any order, reach each limit."""
    return len(scores) - np.searchsorted(np.sort(scores), limits, "left")


def best_case(evidence: Evidence, limits: np.ndarray, precision: float) -> np.ndarray:
    """The p-values if no answer were negative and no validation negative reached a limit: labels play no part."""
    answers = evidence.answers
    yes = Answers(answers.scores, np.ones_like(answers.right), answers.drawn)
    none = None if evidence.negatives is None else np.full_like(evidence.negatives, -np.inf)
    return p_values(replace(evidence, negatives=none, answers=yes), limits, precision)


def right_at_least(evidence: Evidence, delta: float) -> int:
    """Positives among the unknown entries, at least, with probability 1 − delta: so many cannot be negatives.

    For classes that most images have, where it would cost much to suppose that all unknown entries are negative.
    """
    if evidence.negatives is None or evidence.pool or not len(evidence.unknown):
        return 0
    n, found = len(evidence.negatives), 0
    for size in np.unique(np.linspace(0, len(evidence.unknown), _FLOOR_SIZES + 2).astype(int)[1:-1]):
        limit = evidence.unknown[max(0, size - 1) : max(1, size)]
        reached, seen = int(_reached(evidence.unknown, limit)[0]), int(reached_answers(evidence.negatives, limit)[0])
        others = n + evidence.entries - reached
        # The more wrong ones, the less likely that validation shows so few: the first number that is too unlikely.
        first = bisect_left(range(reached + 1), True, key=lambda wrong: bool(
            scipy.stats.hypergeom.cdf(seen, others + wrong, seen + wrong, n) <= delta / _FLOOR_SIZES))
        found = max(found, reached - first + 1 if first <= reached else 0)
    return found


def p_values(evidence: Evidence, limits: np.ndarray, precision: float, floor: int = 0) -> np.ndarray:
    """How likely the evidence would be, at most, if less than `precision` of the undecided entries were right.

    floor: unknown entries that are positive, at least.
    """
    sizes, answers = _reached(evidence.unknown, limits), evidence.answers
    rejected = reached_answers(answers.scores[~answers.right], limits)
    undecided = sizes - reached_answers(answers.scores, limits)
    # So many of the `sizes` entries must be wrong, at least, for the undecided ones to fall short.
    wrong = np.floor((1 - precision) * undecided + 1e-9).astype(np.int64) + 1 + rejected
    found = []
    if evidence.negatives is not None:
        seen, n = reached_answers(evidence.negatives, limits), len(evidence.negatives)
        # Right entries are no negatives: with `wrong` wrong ones there are at most so many negatives among N. (An image
        # with a right entry of a pool can have a negative one besides.)
        total = n + evidence.entries - (0 if evidence.pool else np.maximum(sizes - wrong, floor))
        found.append(scipy.stats.hypergeom.cdf(seen, total, np.minimum(seen + wrong, total), n))
    if answers.drawn.any():
        # A draw among all entries above a lower score is a draw among those above this one.
        lot, other = answers.drawn, ~answers.drawn
        among = sizes - reached_answers(answers.scores[other], limits)
        bad = wrong - reached_answers(answers.scores[other & ~answers.right], limits)
        refused = reached_answers(answers.scores[lot & ~answers.right], limits)
        asked = np.minimum(reached_answers(answers.scores[lot], limits), among)
        found.append(scipy.stats.hypergeom.cdf(refused, among, np.minimum(bad, among), asked))
    if not found:
        return np.ones(len(limits))
    # Two ways to pass, so each has half.
    return np.where(undecided > 0, np.minimum(1.0, len(found) * np.min(found, axis=0)), 1.0)


def contradicted(evidence: Evidence, limits: np.ndarray, precision: float, delta: float) -> np.ndarray:
    """People reject more of the entries above a limit than a set of this precision would have, drawn or not."""
    answers = evidence.answers
    rejected = reached_answers(answers.scores[~answers.right], limits)
    return scipy.stats.binom.sf(rejected - 1, reached_answers(answers.scores, limits), 1 - precision) < delta


def judge(evidence: Evidence, precision: float, delta: float, most: int | None = None) -> Verdict:
    """The lowest threshold at which the precision holds with probability 1 − delta; infinite if there is none."""
    limits = thresholds(evidence, precision, delta, most)
    floor = right_at_least(evidence, delta * _FLOOR_SHARE)
    passed = ((p_values(evidence, limits, precision, floor) <= level(delta))
              & ~contradicted(evidence, limits, precision, delta))
    best = -1
    for start in starts(_reached(evidence.unknown, limits)):
        at = start
        while at < len(limits) and passed[at]:
            best, at = max(best, at), at + 1
    if best < 0:
        return Verdict()
    limit = limits[best : best + 1]
    undecided = _reached(evidence.unknown, limit) - reached_answers(evidence.answers.scores, limit)
    return Verdict(float(limit[0]), int(undecided[0]))


def starts(sizes: np.ndarray) -> list[int]:
    """Places among rising sizes where a sequence begins; they depend on how many entries there are, not on labels."""
    if not len(sizes):
        return []
    wanted = sizes[0] * _START_FACTOR ** np.arange(_STARTS)
    return sorted({int(np.searchsorted(sizes, size)) for size in wanted if size <= sizes[-1]})


def estimated_precision(evidence: Evidence, scores: np.ndarray) -> np.ndarray:
    """[n] Of the entries at or above each score, the part that is right: an estimate, between 0 and 1."""
    sizes = np.searchsorted(-evidence.unknown, -scores, "right")
    if evidence.negatives is None:
        drawn = evidence.answers.drawn
        rising = np.sort(evidence.answers.scores[drawn])
        wrong = np.sort(evidence.answers.scores[drawn & ~evidence.answers.right])
        seen = len(rising) - np.searchsorted(rising, scores)
        return 1 - (len(wrong) - np.searchsorted(wrong, scores)) / np.maximum(1, seen)
    rising = np.sort(evidence.negatives)
    rate = (len(rising) - np.searchsorted(rising, scores)) / max(1, len(rising))
    # As many of the other entries are negative as the estimate itself says: (N − M·right) · rate = M · (1 − right).
    right = (sizes - evidence.entries * rate) / np.maximum(1, sizes) / np.maximum(1e-9, 1 - rate)
    return np.clip(right, 0, 1)
