"""Without fully labelled images: how high does the model rank the known positives of samples that it was not shown?

The samples are those of data.hold_out (training_data.py). The rank of a known positive is 1 + the number of classes
that the model scores higher; the sample's other known positives do not count. A thing that is in the image but was not
annotated may rightly rank higher, so recall at k is no accuracy. It shows whether a model has learnt, and which of two
runs ranks better what people annotate. It says nothing about precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lacuna.data_pipelines.labels import POSITIVE
from lacuna.trainer.evaluate import score_all
from lacuna.trainer.metrics.measures import checked_batch

if TYPE_CHECKING:
    from lacuna.trainer.models.classifier import Classifier
    from lacuna.trainer.whole_run import Run
    from lacuna.trainer.world import World

KS = (1, 3, 5)
_FEW = 30  # known positives below which a share says little


class KnownRanks:
    """Takes scores batch by batch, as metrics.ScoreCollector does."""

    def __init__(self, classes: int, expected: int, predicted: float | None):
        """`expected` samples on all ranks; `predicted`: k, for the threshold at which so many labels are predicted per
        sample."""
        self.predicted, self.samples = predicted, 0
        self.ranks = np.zeros(classes + 1, np.int64)  # known positives by rank
        self._known: list[np.ndarray] = []  # their scores
        self._most = round((predicted or 0) * expected)  # scores that can be above the threshold
        self._high = np.zeros(0, np.float32)

    def add(self, scores, targets, keep=None, ordinals=None) -> None:
        scores, targets = checked_batch(scores, targets)
        positive = targets == POSITIVE
        self.samples += len(scores)
        others = np.sort(np.where(positive, np.inf, -scores), axis=1)  # falling, known positives last
        for row in np.flatnonzero(positive.any(1)):
            own = -scores[row, positive[row]]
            # Of tied classes half count as above: a model that scores all alike is no better than chance.
            above, tied = (np.searchsorted(others[row], own, side) for side in ("left", "right"))
            np.add.at(self.ranks, 1 + (above + tied) // 2, 1)
        self._known.append(scores[positive])
        if self._most:
            self._high = np.concatenate([self._high, scores.reshape(-1)])
            if len(self._high) > 2 * self._most:
                self._high = np.partition(self._high, -self._most)[-self._most :]

    def summary(self, world: World) -> dict[str, float]:
        """Over all ranks: shares in percent."""
        parts = world.gather((self.samples, self.ranks, np.concatenate([np.zeros(0, np.float32), *self._known]),
                              self._high))
        samples, ranks = sum(part[0] for part in parts), sum(part[1] for part in parts)
        known, scores = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
        labels = int(ranks.sum())
        reached = np.cumsum(ranks)
        out: dict[str, float] = {"samples": samples, "labels": labels}
        if not labels:
            return out
        out |= {f"recall_at_{k}": 100.0 * int(reached[min(k, len(ranks) - 1)]) / labels for k in KS}
        out["median_rank"] = int(np.searchsorted(reached, (labels + 1) // 2))
        wanted = round((self.predicted or 0) * samples)
        if 0 < wanted <= len(scores) and labels >= _FEW:
            out["threshold"] = float(np.partition(scores, -wanted)[-wanted])
            out["recall_at_threshold"] = 100.0 * float((known >= out["threshold"]).mean())
        return out


def measure(run: Run, model: Classifier) -> dict[str, float]:
    source = run.sources["held_out"]
    ranks = KnownRanks(source.classes, int(source.counts.sum()), run.method.task.expected_positives)
    score_all(model, source, run.config, run.world, run.watchdog, "held_out", run.cache.evaluation, ranks)
    return ranks.summary(run.world)


def describe(summary: dict, kind: str, classes: int) -> str:
    """For people, empty if there is nothing to say; chance stands beside it, since with few classes it is high."""
    if "recall_at_1" not in summary:
        return ""
    text = (f"of {summary['labels']:,} known labels of {summary['samples']:,} held-out {kind}s, "
            f"{summary['recall_at_1']:.0f} % come first")
    k = next((k for k in KS[::-1] if k < classes), 1)
    if k > 1:
        text += f" and {summary[f'recall_at_{k}']:.0f} % among the first {k}"
    text += f" of {classes:,} classes (by chance: {100 / classes:.0f} %"
    text += f" and {100 * k / classes:.0f} %)" if k > 1 else ")"
    return text + (f"; only {summary['labels']} labels, so take it with care" if summary["labels"] < _FEW else "")


def advice(folder: str) -> str:
    """What would say more."""
    return ("this is no mAP: nobody wrote down what else the images show. To know more, label 100 images: "
            f"`lacuna select {folder} --budget 100` chooses the questions, `lacuna explore {folder}` takes the "
            "answers; images that are labelled completely can become data.val.url")
