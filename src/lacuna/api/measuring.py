"""Average precision of scores in memory."""

from __future__ import annotations

from typing import Any

from lacuna.trainer.metrics import measures
from lacuna.trainer.metrics.measures import RankingResult

__all__ = ["RankingResult", "average_precision"]


def average_precision(scores: Any, labels: Any) -> RankingResult:
    """Exact per-class average precision and the means that papers call mAP.

        result = lacuna.average_precision(scores, labels)
        result.ap                      # float64 [L] in 0..1, NaN for a class without positives
        result.summary()["map"]        # percent; a class without positives counts 0
        result.summary()["map_asl"]    # the same with tied scores in row order; see the summary for all variants
        result.thresholds              # float64 [L]: where F1 is best

    scores: [N, L], numpy or torch, any float type. labels: [N, L], booleans, or integers with 1 positive, 0 negative,
    -1 unknown; unknown entries are outside every ranking. Tied scores form one group, as in scikit-learn.
    """
    return measures.average_precision(scores, measures.ternary(labels))
