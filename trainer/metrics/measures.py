"""Exact multi-label metrics: average precision in the variants that papers report, best-F1 thresholds, top-k.

`average_precision(scores, targets)` for arrays in memory; `metrics_collector.ScoreCollector` for batches and ranks.
The published means differ in what they do with ties and with classes that cannot be scored, so `summary` names each
(all in percent, each with its number of classes):
    map, map_skip_empty   ties grouped (scikit-learn; Cole et al.). A class without positives counts 0, or is skipped.
    map_asl, …_skip_empty ties in row order as in a reversed argsort (ASL, CSL, SPLC code).
    map_csl_c, map_csl_o  CSL on OpenImages: classes with a positive and a negative; plain and positives-weighted mean.
    map_ll                LargeLossMatters on OpenImages: classes with any annotation; without positives they count 0.
Unknown entries are outside every ranking. Legend: N rows, L classes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.metrics.blocks import rank_batches, rank_doubles
from lacuna.trainer.metrics.ranking import ClassStats


@dataclass(frozen=True)
class RankingResult:
    """Per-class results over `count` rows, and the means that papers call mAP."""

    count: int
    classes: ClassStats

    @property
    def ap(self) -> np.ndarray:
        """float64 [L] in 0..1; NaN for a class without positives."""
        return self.classes.ap

    @property
    def thresholds(self) -> np.ndarray:
        """float64 [L]: per class the score at which F1 is best; predict positive where score >= threshold."""
        return self.classes.thresholds

    def summary(self) -> dict[str, float]:
        """Named means in percent, each followed by the number of classes in it; NaN when no class qualifies."""
        c = self.classes
        some, annotated = c.positives > 0, c.positives + c.negatives > 0
        valid = some & (c.negatives > 0)
        everything = np.ones(len(c.ap), bool)
        out: dict[str, float] = {}
        _put(out, "map", c.ap, everything)
        _put(out, "map_skip_empty", c.ap, some)
        if not np.isnan(c.ap_ungrouped[some]).any():
            _put(out, "map_asl", c.ap_ungrouped, everything)
            _put(out, "map_asl_skip_empty", c.ap_ungrouped, some)
        _put(out, "map_csl_c", c.ap, valid)
        _put(out, "map_csl_o", c.ap, valid, weights=c.positives)
        _put(out, "map_ll", c.ap, annotated)
        _put(out, "best_mf1", c.best_f1, everything)
        _put(out, "best_mf1_skip_empty", c.best_f1, some)
        out["rows"] = self.count
        return out

    def table(self, names: Sequence[str], ids: Sequence[str] = ()) -> list[dict[str, object]]:
        """One dict a class, for `write_table`: AP in 0..1, empty when the class has no positives."""
        c = self.classes
        return [{"class": i, "id": ids[i] if len(ids) else "", "name": names[i],
                 "ap": "" if np.isnan(c.ap[i]) else float(c.ap[i]),
                 "positives": int(c.positives[i]), "negatives": int(c.negatives[i])} for i in range(len(c.ap))]


def average_precision(scores, targets, *, ungrouped: bool = True) -> RankingResult:
    """Exact results from scores [N, L] of any float type and targets int8 [N, L]; arrays or tensors.

    `ungrouped=False` leaves out the map_asl variant, which costs time where many scores tie.
    """
    scores, targets = checked_batch(scores, targets, doubles=True)
    ordinals = np.arange(len(scores))
    if scores.dtype in (np.float32, np.float16):
        stats = rank_batches([(scores, targets)], ordinals, scores.shape[1], ungrouped)
    else:
        stats = rank_doubles(scores, targets, ordinals, ungrouped)
    return RankingResult(len(scores), stats)


def ternary(labels) -> np.ndarray:
    """int8 targets from booleans or from integers that are POSITIVE, NEGATIVE or UNKNOWN."""
    array = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if array.dtype == bool:
        return np.where(array, np.int8(POSITIVE), np.int8(NEGATIVE))
    if array.dtype.kind not in "iu":
        raise UserError(f"labels are {array.dtype}; pass booleans or integers.")
    odd = array[(array != POSITIVE) & (array != NEGATIVE) & (array != UNKNOWN)]
    if odd.size:
        raise UserError(f"labels hold {odd.flat[0]}; legal: {POSITIVE} positive, {NEGATIVE} negative, "
                        f"{UNKNOWN} unknown.")
    return array.astype(np.int8, copy=False)


def checked_batch(scores, targets, doubles: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The batch as numpy arrays; a UserError says what is wrong with it. bfloat16 is widened (exactly)."""
    if isinstance(scores, torch.Tensor):
        scores = scores.detach()
        narrow = scores.dtype.is_floating_point and scores.dtype not in (torch.float16, torch.float32, torch.float64)
        scores = (scores.float() if narrow else scores).cpu().numpy()
    if isinstance(targets, torch.Tensor):
        targets = targets.cpu().numpy()
    scores, targets = np.asarray(scores), np.asarray(targets)
    if scores.ndim != 2 or scores.shape != targets.shape:
        raise UserError(f"scores {scores.shape} and targets {targets.shape} must be two matrices [rows, classes] "
                         "of the same shape.")
    if scores.dtype not in (np.float32, np.float16) and not (doubles and scores.dtype.kind == "f"):
        # Rounding float64 here would make ties that were not there.
        raise UserError(f"scores are {scores.dtype}; pass float32, float16 or bfloat16"
                        f"{', or wider floats' if doubles else ''}.")
    if targets.dtype != np.int8:
        raise UserError(f"targets are {targets.dtype}; pass int8 with {POSITIVE} positive, {NEGATIVE} negative, "
                         f"{UNKNOWN} unknown.")
    if scores.size and np.isnan(scores.min()):
        row, cls = np.argwhere(np.isnan(scores))[0]
        raise UserError(f"the score of row {row}, class {cls} of this batch is NaN: the model has diverged. "
                         "Lower the learning rate or resume from an earlier checkpoint.")
    return scores, targets


def f1_counts(scores, targets, thresholds: np.ndarray) -> np.ndarray:
    """int64 [3, L]: true positives, false positives, false negatives of `score >= threshold` among annotated entries.

    Counts of batches and ranks add up; `mean_f1` turns the sum into numbers.
    """
    scores, targets = checked_batch(scores, targets)
    predicted = scores >= thresholds.astype(np.float32)
    positive = targets == POSITIVE
    return np.stack([(predicted & positive).sum(axis=0), (predicted & (targets == NEGATIVE)).sum(axis=0),
                     (~predicted & positive).sum(axis=0)]).astype(np.int64)


def mean_f1(counts: np.ndarray) -> dict[str, float]:
    """mF1 in percent over all classes (without positives: 0) and over those with positives."""
    tp, fp, fn = counts
    f1 = 2.0 * tp / np.maximum(2 * tp + fp + fn, 1)
    out: dict[str, float] = {}
    _put(out, "mf1", f1, np.ones(len(f1), bool))
    _put(out, "mf1_skip_empty", f1, tp + fn > 0)
    return out


def topk_counts(scores, targets, ks: Sequence[int] = (1, 5)) -> np.ndarray:
    """int64 [1 + len(ks)]: rows with a positive, then how many of them have one among their k highest scores.

    Rows without positives are left out (ReaL's rule). Of tied scores the lower class id comes first.
    """
    scores, targets = checked_batch(scores, targets)
    positive = targets == POSITIVE
    keep = positive.any(axis=1)
    scores, positive = scores[keep], positive[keep]
    deepest = min(max(ks), scores.shape[1])
    order = _leading(scores, deepest)
    hit = np.take_along_axis(positive, order, axis=1)
    return np.array([len(scores), *(hit[:, :k].any(axis=1).sum() for k in ks)], np.int64)


def topk_accuracy(counts: np.ndarray, ks: Sequence[int] = (1, 5)) -> dict[str, float]:
    """{"top1": percent, …, "top_rows": rows counted} from summed `topk_counts`."""
    count = int(counts[0])
    out = {f"top{k}": 100.0 * int(c) / count if count else float("nan") for k, c in zip(ks, counts[1:], strict=True)}
    return {**out, "top_rows": count}


def write_table(url: str, rows: list[dict[str, object]]) -> None:
    """Write dicts with equal keys as a CSV file, atomically."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    storage.write_atomic(url, buffer.getvalue().encode())


def _leading(scores: np.ndarray, k: int) -> np.ndarray:
    """int64 [N, k]: class ids by falling score; a stable sort of the negated scores makes ties deterministic."""
    if k == 1:
        return scores.argmax(axis=1)[:, None]
    kth = np.partition(scores, -k, axis=1)[:, [-k]]
    # Everything below the k-th score is out; the stable sort then orders the few that are left, ties by class id.
    return np.argsort(np.where(scores >= kth, -scores, np.inf), axis=1, kind="stable")[:, :k]


def _put(out: dict[str, float], name: str, values: np.ndarray, chosen: np.ndarray,
         weights: np.ndarray | None = None) -> None:
    """Mean of the chosen classes in percent, NaN (nothing to score) counting 0, and how many they are."""
    values = np.nan_to_num(values[chosen])
    w = np.ones(len(values)) if weights is None else weights[chosen].astype(np.float64)
    out[name] = 100.0 * float((values * w).sum() / w.sum()) if len(values) else float("nan")
    out[name + "_classes"] = len(values)
