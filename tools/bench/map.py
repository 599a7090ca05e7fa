"""Exact mAP of batches collected as an evaluation does, against scikit-learn and torchmetrics.

Ratios:
  vs_sklearn          fully annotated scores: scikit-learn's time ÷ ours (collecting the batches is part of ours) [≥ 20]
  vs_torchmetrics     the same for torchmetrics' exact form (thresholds=None) with all of torch's threads [≥ 20]
  partial_vs_sklearn  10 annotated entries a row among 9,600 classes, scikit-learn class by class
  partial_vs_torchmetrics  the same for torchmetrics (ignore_index)
  max_abs_diff        largest difference of a class's AP, both cases; half of the compared classes have tied scores
  memory_vs_scores    extra memory at its peak ÷ size of the fully annotated scores, copies of the batches included
scikit-learn and torchmetrics are timed on every fourth class and their time multiplied by four. torchmetrics computes
in float32; `torchmetrics_diff` is its largest difference. Where it is not installed (extra `peers`), `not_run` says so.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import average_precision_score

from lacuna.basics.errors import UserError
from lacuna.basics.process_memory import peak_resident_bytes, resident_bytes
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.tools.bench.peers import Peers
from lacuna.trainer.metrics.collector import ScoreCollector

Reference = Callable[[np.ndarray, np.ndarray, range], np.ndarray]  # scores, targets, classes → AP
_BATCH = 256
_REPEATS = 3
_TIMED = slice(None, None, 4)  # the classes that scikit-learn is timed on
# ReaL has 46,837 labelled images, 1,000 classes and 1.2288 positives an image.
_POSITIVES_PER_ROW = 1.2288


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the made-up scores (default 0)")
    parser.add_argument("--dense", metavar="ROWSxCLASSES", help="another size of the fully annotated case")
    parser.add_argument("--partial", metavar="ROWSxCLASSES", help="another size of the partially annotated case")


def run(quick: bool, args: argparse.Namespace) -> dict:
    dense_size = _size("--dense", args.dense) or (46_837, 500 if quick else 1_000)
    partial_size = _size("--partial", args.partial) or (10_000 if quick else 20_000, 9_600)
    peers = Peers()
    others: dict[str, Reference] = {"sklearn": sklearn_ap}
    others |= peers.build({"torchmetrics": ("torchmetrics", torchmetrics_ap)})
    scores, targets = dense_case(np.random.default_rng(args.seed), *dense_size)
    extra = peak_extra_bytes(lambda: ours(scores, targets))
    dense = compare("dense", scores, targets, others)
    size = scores.nbytes
    del scores, targets
    scores, targets = partial_case(np.random.default_rng(args.seed + 1), *partial_size, annotated=10)
    partial = compare("partial", scores, targets, others)
    return {
        "ratios": {
            **{f"vs_{name}": round(dense[f"{name}_seconds"] / dense["seconds"], 2) for name in others},
            **{f"partial_vs_{name}": round(partial[f"{name}_seconds"] / partial["seconds"], 2) for name in others},
            "max_abs_diff": max(dense["max_abs_diff"], partial["max_abs_diff"]),
            "memory_vs_scores": round(extra / size, 3),
        },
        "dense": dense, "partial": partial, **peers.facts(),
        "note": "sklearn_seconds, torchmetrics_seconds: measured on classes_timed classes, scaled to all; "
                f"seconds: median of {_REPEATS}, collecting included",
    }


def _size(flag: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    numbers = text.split("x")
    if len(numbers) != 2 or not all(n.isdigit() and int(n) > 0 for n in numbers):
        raise UserError(f"{flag} {text!r}: give two numbers above 0, for example {flag} 5000x200.")
    return int(numbers[0]), int(numbers[1])


def dense_case(rng: np.random.Generator, rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Sigmoid scores and full annotation."""
    targets = (rng.random((rows, classes), dtype=np.float32) < _POSITIVES_PER_ROW / classes).astype(np.int8)
    return _scores_for(rng, targets), targets


def partial_case(rng: np.random.Generator, rows: int, classes: int, annotated: int) -> tuple[np.ndarray, np.ndarray]:
    """Sigmoid scores and `annotated` known entries in each row."""
    targets = np.full((rows, classes), UNKNOWN, np.int8)
    where = rng.integers(0, classes, (rows, annotated))
    targets[np.arange(rows)[:, None], where] = rng.choice([POSITIVE, NEGATIVE], where.shape)
    return _scores_for(rng, targets), targets


def ours(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """AP per class, in the way an evaluation gets it: batch by batch."""
    collector = ScoreCollector(scores.shape[1])
    for start in range(0, len(scores), _BATCH):
        collector.add(scores[start : start + _BATCH], targets[start : start + _BATCH])
    return collector.result().ap


def sklearn_ap(scores: np.ndarray, targets: np.ndarray, classes: range) -> np.ndarray:
    """The reference: annotated entries of one class after the other."""
    out = np.full(len(classes), np.nan)
    for i, c in enumerate(classes):
        known = targets[:, c] != UNKNOWN
        truth = targets[known, c] == POSITIVE
        if truth.any():
            out[i] = average_precision_score(truth, scores[known, c])
    return out


def torchmetrics_ap() -> Reference:
    from torchmetrics.functional.classification import multilabel_average_precision

    def ap(scores: np.ndarray, targets: np.ndarray, classes: range) -> np.ndarray:
        chosen = slice(classes.start, classes.stop, classes.step)
        # It stumbles over a class without any annotation, and finds 0 or -0 where there is no positive.
        positive = (targets[:, chosen] == POSITIVE).any(0)
        found = np.full(len(classes), np.nan)
        found[positive] = multilabel_average_precision(
            torch.from_numpy(scores[:, chosen][:, positive]), torch.from_numpy(targets[:, chosen][:, positive]).long(),
            int(positive.sum()), average="none", thresholds=None, ignore_index=UNKNOWN,
            validate_args=False).double().numpy()
        return found

    return ap


def compare(name: str, scores: np.ndarray, targets: np.ndarray, others: dict[str, Reference]) -> dict:
    timed = range(scores.shape[1])[_TIMED]
    found: dict = {"rows": scores.shape[0], "classes": scores.shape[1], "classes_timed": len(timed)}
    seconds, references = [], {}
    for _ in range(_REPEATS):
        start = time.perf_counter()
        ap = ours(scores, targets)
        seconds.append(time.perf_counter() - start)
    for other, reference in others.items():
        start = time.perf_counter()
        references[other] = reference(scores, targets, timed)
        found[f"{other}_seconds"] = round((time.perf_counter() - start) * scores.shape[1] / len(timed), 3)
    found["seconds"] = round(statistics.median(seconds), 4)
    for other, values in references.items():
        assert np.array_equal(np.isnan(ap[_TIMED]), np.isnan(values)), "classes without positives differ"
        difference = float(np.nanmax(np.abs(ap[_TIMED] - values)))
        found["max_abs_diff" if other == "sklearn" else f"{other}_diff"] = difference
        print(f"{name}: {scores.shape[0]:,} × {scores.shape[1]:,}: ours {found['seconds']:.2f} s, {other} "
              f"{found[other + '_seconds']:.1f} s (scaled from {len(timed):,} classes), largest difference "
              f"{difference:.1e}", flush=True)
    return found


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Extra memory of a call at its peak: the larger of what was requested and what became resident."""
    resident = resident_bytes()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew; without it the peak is an upper bound
    tracemalloc.start()  # numpy reports its arrays to tracemalloc
    call()
    requested = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return max(requested, peak_resident_bytes() - resident)


def _scores_for(rng: np.random.Generator, targets: np.ndarray) -> np.ndarray:
    """float32 scores that prefer positives; in every other timed class rounded to float16, so that many tie."""
    scores = rng.standard_normal(targets.shape, dtype=np.float32)
    scores *= 2
    scores -= 5
    scores[targets == POSITIVE] += 4
    np.negative(scores, out=scores)
    np.exp(scores, out=scores)
    scores += 1
    np.reciprocal(scores, out=scores)
    for start in range(0, scores.shape[1], 8):
        tied = scores[:, start : start + 4]
        tied[:] = tied.astype(np.float16)
    return scores
