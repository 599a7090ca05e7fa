"""The protocols: which rows and classes count, and what each number is called. Percent everywhere.

Both rules for classes that cannot be scored are always given: `map` counts them as 0 over all classes, as Cole et al.'s
code does; `map_skip_empty` leaves them out. Legend: B rows of a piece, L classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.tools.eval.calibration import Calibration, Odds, Reliability
from lacuna.tools.eval.truth import NO_LABEL
from lacuna.trainer.metrics.collector import ScoreCollector
from lacuna.trainer.metrics.measures import RankingResult, f1_counts, mean_f1, topk_accuracy, topk_counts

GROUPS = 5
_CHANCE_MARGIN = 0.05  # of the way from chance to perfect; every trained model is far beyond


@dataclass(frozen=True)
class Piece:
    """Some rows of an evaluation set."""

    scores: np.ndarray  # float32 [B, L]
    targets: np.ndarray  # int8 [B, L]
    ordinals: np.ndarray  # int64 [B]: place in the set, whoever scored it
    originals: np.ndarray | None = None  # int64 [B]: ImageNet's own label, for top-1 and top-5
    ranked: np.ndarray | None = None  # float32 [B, L]: scores with unlisted classes below all others


@dataclass(frozen=True)
class Outcome:
    numbers: dict[str, float | int | None]
    result: RankingResult  # per class, over all rows that count
    f1: np.ndarray | None = None  # float64 [L] with given thresholds


class Measurement:
    """Takes pieces, one after another, and gives the numbers of a protocol."""

    def __init__(self, classes: int, thresholds: np.ndarray | None = None, calibration: Calibration | None = None):
        self.collector = ScoreCollector(classes)
        self.thresholds, self.calibration = thresholds, calibration
        self.odds = Odds(classes)
        self._as_given, self._calibrated = Reliability(classes), Reliability(classes)
        self._truncated = False
        self.count = 0
        self._f1 = np.zeros((3, classes), np.int64)
        self._original = np.zeros(3, np.int64)
        self._sets = np.zeros(3, np.int64)

    def add_all(self, pieces: Iterable[Piece]) -> Measurement:
        for piece in pieces:
            self.count += len(piece.scores)
            ranked = piece.scores if piece.ranked is None else piece.ranked
            if piece.originals is not None:
                self._original += topk_counts(ranked, _one_hot(piece.originals, piece.targets.shape))
            self._sets += topk_counts(ranked, piece.targets)
            self._truncated |= piece.ranked is not None
            self.odds.add(piece.scores, piece.targets)
            self._as_given.add(piece.scores, piece.targets)
            if self.calibration is not None:
                self._calibrated.add(self.calibration(piece.scores), piece.targets)
            if self.thresholds is not None:
                self._f1 += f1_counts(piece.scores, piece.targets, self.thresholds)
            self.collector.add(piece.scores, piece.targets, ordinals=piece.ordinals)
        return self

    def multilabel(self, most: int = 4) -> Outcome:
        """mAP, mF1, and mAP of the images with k = 1, 2, …, `most` or more true labels."""
        result = self.collector.result(ungrouped=False)
        numbers = _means(result, ("map", "map_skip_empty"))
        numbers |= self._by_labels(most)
        if not self._truncated:
            numbers["ece"] = self._as_given.error()
            numbers["ece_calibrated"] = self._calibrated.error() if self.calibration is not None else None
        return self._outcome(numbers, result)

    def real(self, tops: tuple[int, ...] = (1, 5), originals: bool = True) -> Outcome:
        """Images with an empty label set count for the original top-k only."""
        some = self.collector.row_positives() > 0
        result = self.collector.result(rows=some, ungrouped=False)
        numbers: dict[str, float | int | None] = {"rows": self.count, "real_rows": int(some.sum())}
        original, sets = topk_accuracy(self._original), topk_accuracy(self._sets)
        for k in (1, 5):
            numbers[f"top{k}"] = original[f"top{k}"] if originals and k in tops else None
        for k in (1, 5):
            numbers[f"real_top{k}"] = sets[f"top{k}"] if k in tops else None
        numbers |= _means(result, ("map", "map_skip_empty")) | self._by_labels(4)
        return self._outcome(numbers, result)

    def partial(self, frequency: np.ndarray) -> Outcome:
        """Annotated entries only; classes with a positive and a negative. frequency: int64 [L], orders the groups."""
        result = self.collector.result(ungrouped=False)
        summary = result.summary()
        numbers: dict[str, float | int | None] = {"rows": self.count}
        for name, theirs in (("map_c", "map_csl_c"), ("map_o", "map_csl_o"), ("map_ll", "map_ll")):
            numbers[name], numbers[f"{name}_classes"] = summary[theirs], int(summary[f"{theirs}_classes"])
        stats = result.classes
        valid = np.flatnonzero((stats.positives > 0) & (stats.negatives > 0))
        order = valid[np.argsort(frequency[valid], kind="stable")]
        for number, group in enumerate(np.array_split(order, GROUPS), 1):
            numbers[f"map_group{number}"] = 100 * float(stats.ap[group].mean()) if len(group) else float("nan")
            numbers[f"map_group{number}_classes"] = len(group)
        return self._outcome(numbers, result)

    def _by_labels(self, most: int) -> dict[str, float | int | None]:
        found: dict[str, float | int | None] = {}
        labels = self.collector.row_positives()
        for k in range(1, most + 1):
            rows = labels >= k if k == most else labels == k
            name = f"k{k}plus" if k == most else f"k{k}"
            found[f"rows_{name}"] = int(rows.sum())
            part = self.collector.result(rows=rows, ungrouped=False)
            found |= {key.replace("map", f"map_{name}", 1): value
                      for key, value in _means(part, ("map", "map_skip_empty")).items()}
        return found

    def _outcome(self, numbers: dict[str, float | int | None], result: RankingResult) -> Outcome:
        numbers.setdefault("rows", self.count)
        numbers |= _means(result, ("best_mf1", "best_mf1_skip_empty"))
        if self.thresholds is None:
            return Outcome(numbers, result)
        numbers |= mean_f1(self._f1)
        hits, wrong, missed = self._f1
        return Outcome(numbers, result, 2.0 * hits / np.maximum(2 * hits + wrong + missed, 1))


def near_chance(result: RankingResult, top1: float | None = None) -> str | None:
    """Says so when the ranking knows nothing: a class list in another order looks exactly like this."""
    stats = result.classes
    some = stats.positives > 0
    if not some.any():
        return None
    chance = float((stats.positives[some] / (stats.positives + stats.negatives)[some]).mean())
    found = float(stats.ap[some].mean())
    if found < chance + _CHANCE_MARGIN * (1 - chance):
        return (f"the mean AP of {100 * found:.2f} is about what random scores give ({100 * chance:.2f}): are the "
                "classes in another order, or the rows those of other images?")
    guess = 1 / len(some)
    if top1 is not None and top1 < 100 * (guess + _CHANCE_MARGIN * (1 - guess)):
        return f"top-1 of {top1:.2f} is about what guessing gives: are the rows or classes in another order?"
    return None


def _means(result: RankingResult, names: tuple[str, ...]) -> dict[str, float | int | None]:
    summary = result.summary()
    return {key: (int(summary[key]) if key.endswith("_classes") else summary[key])
            for name in names for key in (name, f"{name}_classes")}


def _one_hot(ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = np.full(shape, NEGATIVE, np.int8)
    there = np.flatnonzero(ids != NO_LABEL)
    out[there, ids[there]] = POSITIVE
    return out
