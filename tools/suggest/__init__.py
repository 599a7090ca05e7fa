"""The missing labels that a model is most sure of: per class, down to the score that keeps a chosen precision.

  lacuna suggest runs/my-run --precision 0.9 --out suggestions.csv           the run's training set and validation set
  lacuna suggest runs/my-run --shards shards/new --val shards/val --out suggestions.parquet
  lacuna suggest runs/my-run --out s.csv --sidecar suggested                 also a sidecar to train with
  lacuna suggest runs/my-run --out s.csv --truth labels                      measure, where the true labels are known
Thresholds come from a fully labelled validation set, one a class: the lowest score at which, of the suggestions made
there, (wrong ones + 1) are still at most 1 − precision of all; the +1 keeps small classes honest. Positives that are
annotated cannot be suggested, so true ones count by the part that is not. A class that no score satisfies gets none.
The column `precision` is what the validation set showed for that class at that score.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.eval.pieces import from_parts
from lacuna.tools.passes.datasets import add_val_arguments, open_dataset, training_set, val_set
from lacuna.tools.passes.pool import Pool, PoolSettings, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import ScoreJob, bad_of, shard_rows
from lacuna.tools.passes.trained import Trained, held
from lacuna.tools.suggest.table import Suggestions, check_format, table, write_sidecar, write_table
from lacuna.trainer.evaluate import judge_bad

_MOST_OBSERVED = 0.95  # of a class's positives: more is a rounding of small counts


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint), or a checkpoint")
    parser.add_argument("--out", required=True, metavar="FILE", help="table to write: .csv or .parquet")
    parser.add_argument("--precision", type=float, default=0.9, help="part of them that is right (default 0.9)")
    parser.add_argument("--shards", metavar="URL", help="samples that lack labels (default: the run's training set)")
    parser.add_argument("--labels", metavar="NAME", help="their sidecar; only its unknown entries are suggested "
                        "(default: the run's for its own training set, else labels)")
    parser.add_argument("--subset", metavar="NAME", help="only these rows (default: as for --labels)")
    add_val_arguments(parser, "fully labelled shards for the thresholds (default: the run's validation set)")
    parser.add_argument("--max-per-class", type=int, metavar="N", help="at most so many of a class, the surest")
    parser.add_argument("--sidecar", metavar="NAME", help="also write a sidecar: the labels with the suggestions added")
    parser.add_argument("--truth", metavar="NAME", help="sidecar with the true labels: report precision and recall")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    check_format(args.out, "--out")
    if not 0 < args.precision < 1:
        raise UserError(f"--precision {args.precision}: legal are numbers between 0 and 1, such as 0.9.")
    settings = pool_settings(args)
    with held(args.model, settings.folder) as trained, open_pool(settings) as pool:
        source, val = sources(trained, args)
        truth = Sidecar.load(source.index, args.truth) if args.truth else None
        calibration = calibrate(pool, settings, trained, val, source, args.precision)
        found, measured = collect(pool, settings, trained, source, calibration, truth)
    columns = found.sorted(args.max_per_class)
    write_table(args.out, table(source.index, columns, calibration.precision_at))
    facts = {"out": args.out, "suggestions": len(columns["row"]), "precision_asked": args.precision,
             "classes": int(np.isfinite(calibration.thresholds).sum()), "of_classes": source.classes,
             "samples": int(source.rows.sum()), **(measured.facts() if truth else {})}
    if args.sidecar:
        entries = {(int(s), int(r), int(c)): POSITIVE for s, r, c in zip(
            columns["shard"], columns["row"], columns["class"], strict=True)}
        write_sidecar(source.sidecar, args.sidecar, entries, {"by": "lacuna suggest", "precision": args.precision})
        facts["sidecar"] = args.sidecar
    print(json.dumps(facts) if args.json else _text(facts))


def _text(facts: dict) -> str:
    lines = [f"{facts['out']}: {facts['suggestions']:,} suggestions for {facts['samples']:,} samples, in "
             f"{facts['classes']} of {facts['of_classes']} classes"]
    if facts["classes"] < facts["of_classes"]:
        lines.append(f"{facts['of_classes'] - facts['classes']} classes get none: on the validation set no score keeps "
                     f"precision {facts['precision_asked']}")
    if "precision" in facts:
        lines.append(f"precision {facts['precision']:.3f} (asked: {facts['precision_asked']}), recall of hidden "
                     f"positives {facts['recall']:.3f}; mean over classes: precision "
                     f"{facts['class_precision']:.3f}, recall {facts['class_recall']:.3f}")
    return "\n".join(lines)


def sources(trained: Trained, args: argparse.Namespace) -> tuple[ShardSource, ShardSource]:
    source = training_set(trained, args.shards, args.labels, args.subset)
    own, val = trained.config.data.val, val_set(trained, args)
    if val is None:
        if own is None:
            raise UserError("--val is needed: the run has no validation set, and thresholds are chosen on one.")
        val = open_dataset(trained, own.url, own.labels, own.subset)
    if source.sidecar.unlisted == NEGATIVE:
        raise UserError(f"{source.index.url}: its sidecar {source.sidecar.name!r} knows every entry, so nothing is "
                        "missing. Choose a partial one with --labels.")
    return source, val


@dataclass(frozen=True)
class Calibration:
    """Per class, what the validation set says about a score and everything above it."""

    thresholds: np.ndarray  # float64 [L]; infinite: no suggestions
    steps: list[tuple[np.ndarray, np.ndarray]]  # of every class: rising scores, and the precision from there upwards

    def precision_at(self, classes: np.ndarray, scores: np.ndarray) -> np.ndarray:
        found = np.zeros(len(classes))
        for cls in np.unique(classes):
            here = classes == cls
            limits, precision = self.steps[int(cls)]
            found[here] = precision[np.clip(np.searchsorted(limits, scores[here], "right") - 1, 0, len(limits) - 1)]
        return found


def calibrate(pool: Pool, settings: PoolSettings, trained: Trained, val: ShardSource, source: ShardSource,
              precision: float) -> Calibration:
    rows = shard_rows(val)
    parts = pool.run(ScoreJob(trained, val), rows, settings.folder(trained.run), "scoring the validation set")
    pieces = list(from_parts(parts, val, trained.config.data.max_bad_fraction))
    if not pieces:
        raise UserError(f"{val.index.url}: no sample could be read.")
    if not settings.parts:
        parts.remove(list(rows))
    positives = source.sidecar.positives if source.subset is None else source.subset_counts()[0]
    annotated = positives / max(1, source.rows.sum())
    return choose(np.concatenate([piece.scores for piece in pieces]),
                  np.concatenate([piece.targets for piece in pieces]), annotated, precision)


def choose(scores: np.ndarray, labels: np.ndarray, annotated: np.ndarray, precision: float) -> Calibration:
    """Thresholds from validation scores and labels [n, L]; `annotated` [L] are positives per sample that are known."""
    thresholds = np.full(scores.shape[1], np.inf)
    steps = []
    for cls in range(scores.shape[1]):
        known = labels[:, cls] != UNKNOWN
        order = np.argsort(-scores[known, cls], kind="stable")
        value, positive = scores[known, cls][order], (labels[known, cls] == POSITIVE)[order]
        observed = min(annotated[cls] / max(positive.mean() if len(positive) else 0.0, 1e-12), _MOST_OBSERVED)
        right, wrong = np.cumsum(positive) * (1 - observed), np.cumsum(~positive)
        # A threshold takes all entries that are tied at it: only the last of equal scores is one.
        last = np.append(value[1:] != value[:-1], True) if len(value) else np.zeros(0, bool)
        value, right, wrong = value[last], right[last], wrong[last]
        kept = np.flatnonzero(wrong + 1 <= (1 - precision) * (right + wrong + 1))
        if len(kept):
            thresholds[cls] = value[kept[-1]]
        steps.append((value[::-1], (right / np.maximum(right + wrong, 1e-12))[::-1]))
    return Calibration(thresholds, steps)


@dataclass
class Measured:
    """Right suggestions, all suggestions and hidden positives of every class, where the truth is known."""

    right: np.ndarray = field(default_factory=lambda: np.zeros(0))
    made: np.ndarray = field(default_factory=lambda: np.zeros(0))
    hidden: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def facts(self) -> dict[str, float]:
        some, there = self.made > 0, self.hidden > 0
        return {"precision": float(self.right.sum() / max(1, self.made.sum())),
                "recall": float(self.right.sum() / max(1, self.hidden.sum())),
                "class_precision": float((self.right[some] / self.made[some]).mean()) if some.any() else float("nan"),
                "class_recall": float((self.right[there] / self.hidden[there]).mean()) if there.any() else float("nan"),
                "hidden_positives": int(self.hidden.sum())}


def collect(pool: Pool, settings: PoolSettings, trained: Trained, source: ShardSource, calibration: Calibration,
            truth: Sidecar | None) -> tuple[Suggestions, Measured]:
    rows = shard_rows(source)
    parts = pool.run(ScoreJob(trained, source), rows, settings.folder(trained.run), "scoring")
    found = Suggestions(source.index)
    counts, bad = np.zeros((3, source.classes), np.int64), []
    for shard, part in parts.read_all(list(rows)):
        bad += bad_of(part)
        labels = source.sidecar.labels(shard).dense(source.classes, part["rows"])
        chosen = found.add(shard, part["rows"], part["scores"], labels, calibration.thresholds)
        if truth is not None:
            positive = truth.labels(shard).dense(source.classes, part["rows"]) == POSITIVE
            counts += np.stack([(chosen & positive).sum(0), chosen.sum(0), (positive & (labels == UNKNOWN)).sum(0)])
        if not settings.parts:
            parts.remove([shard])
    judge_bad(bad, int(source.rows.sum()), trained.config.data.max_bad_fraction, source.index.url)
    return found, Measured(*counts)
