"""The missing labels that a model is most sure of: per class, down to the score that keeps a promised precision.

  lacuna suggest runs/my-run --precision 0.9 --out suggestions.csv           the run's training set and validation set
  lacuna suggest runs/my-run --shards shards/new --val shards/val --out suggestions.parquet
  lacuna suggest runs/my-run --out s.csv --sidecar suggested                 also a sidecar to train with
  lacuna suggest runs/my-run --out s.csv --truth labels                      measure, where the true labels are known
  lacuna suggest runs/my-run --out s.csv --scores shards/clip                by another model's table (`lacuna scores`)
The promise, for every class that gets suggestions: with probability 1 − delta at least --precision of them are right.
It holds for any number of samples, if a negative entry of these samples reaches a score no more often than a negative
of the validation set (images of one source, validation images not trained on). How frequent a class is, and how hard
its unannotated positives are, may differ. With --pool, classes with too few likely entries for a promise of their own
are taken together; the promise is then about all of them, and single ones can fall short (column promise).
Decisions made in `lacuna explore` count at once: decided entries are not suggested again, and a class whose suggestions
people reject more often than promised gets none. Without a validation set nothing can be promised, except from answers
to questions drawn by lot (`lacuna select RUN --by lot`), which need no assumption at all.
The column `precision` is the estimate for everything of that class at or above that score.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.datasets import add_val_arguments, open_dataset, training_set, val_set
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.pool import Pool, PoolSettings, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import ScoreJob, bad_of, shard_rows
from lacuna.tools.passes.tables import TableParts
from lacuna.tools.passes.trained import Trained, held
from lacuna.tools.suggest.evidence import (
    Scored,
    class_evidence,
    decisions_of,
    pool_evidence,
    surest,
    val_scores,
)
from lacuna.tools.suggest.promise import Evidence, Verdict, contradicted, estimated_precision, judge
from lacuna.tools.suggest.table import Suggestions, check_format, table, write_sidecar, write_table
from lacuna.trainer.evaluate import judge_bad


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint), or a checkpoint")
    parser.add_argument("--out", required=True, metavar="FILE", help="table to write: .csv or .parquet")
    parser.add_argument("--precision", type=float, default=0.9, help="part of them that is right (default 0.9)")
    parser.add_argument("--delta", type=float, default=0.05, help="probability that a class falls short (default 0.05)")
    parser.add_argument("--pool", action="store_true", help="also suggest for classes that are too small for a promise "
                        "of their own: together, at most one entry per image")
    parser.add_argument("--shards", metavar="URL", help="samples that lack labels (default: the run's training set)")
    parser.add_argument("--labels", metavar="NAME", help="their sidecar; only its unknown entries are suggested "
                        "(default: the run's for its own training set, else labels)")
    parser.add_argument("--subset", metavar="NAME", help="only these rows (default: as for --labels)")
    add_val_arguments(parser, "fully labelled shards for the promise (default: the run's validation set)")
    parser.add_argument("--scores", metavar="TABLE", help="take the samples' scores from this table (`lacuna scores`, "
                        "`lacuna import-scores`) instead of the run's model")
    parser.add_argument("--val-scores", metavar="TABLE", help="the same for the validation samples (default: --scores, "
                        "where both are rows of the same shards)")
    parser.add_argument("--max-per-class", type=int, metavar="N", help="at most so many of a class, the surest")
    parser.add_argument("--sidecar", metavar="NAME", help="also write a sidecar: the labels with the suggestions added")
    parser.add_argument("--truth", metavar="NAME", help="sidecar with the true labels: report precision and recall")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    _check(args)
    settings = pool_settings(args)
    with held(args.model, settings.folder) as trained, open_pool(settings) as pool:
        source, val = sources(trained, args)
        decided, lots = decisions_of(trained.run, source.sidecar)
        if val is None and not lots:
            raise UserError(f"{trained.run}: no validation set, so nothing can be promised. Name fully labelled shards "
                            f"with --val URL, or answer questions drawn by lot: `lacuna select {args.model} --by lot "
                            f"--out questions.csv`, then `lacuna explore {args.model}`.")
        truth = Sidecar.load(source.index, args.truth) if args.truth else None
        scores = _Scores(pool, settings, trained)
        known = None
        if val is not None:
            of_val = scores.of(val, args.val_scores or args.scores, "--val-scores")
            known = val_scores(of_val, val, trained.config.data.max_bad_fraction)
            scores.drop(of_val, val)
        parts = scores.of(source, args.scores, "--scores")
        scored = Scored(parts, source, decided)
        promises = make_promises(scored, known, lots, args)
        found, measured = collect(scored, promises, truth, trained.config.data.max_bad_fraction, args.precision)
        scores.drop(parts, source)
    columns = found.sorted()
    write_table(args.out, table(source.index, columns, promises.precision_at, promises.pooled))
    facts = {"out": args.out, "suggestions": len(columns["row"]), "precision_asked": args.precision,
             "delta": args.delta, "classes": int(np.isfinite(promises.thresholds).sum()),
             "pooled_classes": int(promises.pooled.sum()),
             "pooled_suggestions": int(promises.pooled[columns["class"]].sum()),
             "of_classes": source.classes, "samples": int(source.counts.sum()), "decisions": len(decided),
             "assumes": "nothing" if known is None else "negatives score as in the validation set, or lower",
             **(measured.facts() if truth else {})}
    if args.sidecar:
        entries = {(int(s), int(r), int(c)): POSITIVE for s, r, c in zip(
            columns["shard"], columns["row"], columns["class"], strict=True)}
        write_sidecar(source.sidecar, args.sidecar, entries, {"by": "lacuna suggest", "precision": args.precision})
        facts["sidecar"] = args.sidecar
    print(json.dumps(facts) if args.json else _text(facts))


@dataclass(frozen=True)
class _Scores:
    """Of a dataset's samples: by a pass of the run's model, or from a table."""

    pool: Pool
    settings: PoolSettings
    trained: Trained

    def of(self, source: ShardSource, table: str | None, flag: str) -> Parts | TableParts:
        if table:
            return TableParts(table, source, flag)
        return self.pool.run(ScoreJob(self.trained, source), shard_rows(source), self.settings.folder(self.trained.run),
                             f"scoring {source.index.url}")

    def drop(self, parts: Parts | TableParts, source: ShardSource) -> None:
        """What a pass has written, unless it was to be kept."""
        if isinstance(parts, Parts) and not self.settings.parts:
            parts.remove(list(shard_rows(source)))


def _check(args: argparse.Namespace) -> None:
    if args.val_scores and not args.scores:
        raise UserError(f"--val-scores {args.val_scores}: the promise compares scores of one model. Give the samples' "
                        "table, too: --scores TABLE.")
    check_format(args.out, "--out")
    for option in ("precision", "delta"):
        value = getattr(args, option)
        if not 0 < value < 1:
            raise UserError(f"--{option} {value}: legal are numbers between 0 and 1, such as "
                            f"{'0.9' if option == 'precision' else '0.05'}.")
    if args.max_per_class is not None and args.max_per_class < 1:
        raise UserError(f"--max-per-class {args.max_per_class}: at least 1 is needed.")


def _text(facts: dict) -> str:
    lines = [f"{facts['out']}: {facts['suggestions']:,} suggestions for {facts['samples']:,} samples: with probability "
             f"{1 - facts['delta']:g} at least {facts['precision_asked']:g} of a class are right, in "
             f"{facts['classes']} of {facts['of_classes']} classes"]
    if facts["pooled_suggestions"]:
        lines.append(f"{facts['pooled_suggestions']:,} of them are of the pool of {facts['pooled_classes']} classes "
                     "that are too small for a promise of their own: the promise is about the pool")
    none = facts["of_classes"] - facts["classes"] - (facts["pooled_classes"] if facts["pooled_suggestions"] else 0)
    if none:
        lines.append(f"{none} classes get none: no score keeps precision {facts['precision_asked']:g} for sure. A "
                     "lower --precision, a larger validation set, or decisions in `lacuna explore` give more")
    lines.append(f"this assumes: {facts['assumes']}")
    if "precision" in facts:
        lines.append(f"precision {facts['precision']:.3f} (asked: {facts['precision_asked']}), recall of hidden "
                     f"positives {facts['recall']:.3f}; mean over classes: precision "
                     f"{facts['class_precision']:.3f}, recall {facts['class_recall']:.3f}; classes that fall short: "
                     f"{facts['short_classes']} of {facts['checked_classes']} with at least {_CHECKED} suggestions")
    return "\n".join(lines)


def sources(trained: Trained, args: argparse.Namespace) -> tuple[ShardSource, ShardSource | None]:
    source = training_set(trained, args.shards, args.labels, args.subset)
    own, val = trained.config.data.val, val_set(trained, args)
    if val is None and own is not None:
        val = open_dataset(trained, own.url, own.labels, own.subset)
    if source.sidecar.unlisted == NEGATIVE:
        raise UserError(f"{source.index.url}: its sidecar {source.sidecar.name!r} knows every entry, so nothing is "
                        "missing. Choose a partial one with --labels.")
    return source, val


@dataclass(frozen=True)
class Promises:
    """Where suggestions begin: per class, and for the pool of those that have no threshold of their own."""

    thresholds: np.ndarray  # float64 [L]; infinite: no promise of its own
    pooled: np.ndarray  # bool [L]: in the pool
    pool: Verdict
    evidence: list[Evidence]

    def precision_at(self, classes: np.ndarray, scores: np.ndarray) -> np.ndarray:
        found = np.zeros(len(classes))
        for cls in np.unique(classes):
            here = classes == cls
            found[here] = estimated_precision(self.evidence[int(cls)], scores[here])
        return found

    def chosen(self, scores: np.ndarray, unknown: np.ndarray) -> np.ndarray:
        """bool [n, L] of the entries to suggest."""
        taken = unknown & (scores >= self.thresholds)
        if np.isfinite(self.pool.threshold) and len(scores):
            best, there = surest(scores, unknown, np.flatnonzero(self.pooled))
            rows = np.arange(len(scores))
            taken[rows, best] |= there & (scores[rows, best] >= self.pool.threshold)
        return taken


def make_promises(scored: Scored, val: tuple[np.ndarray, np.ndarray] | None, lots: set[tuple[int, int, int]],
                  args: argparse.Namespace) -> Promises:
    evidence = class_evidence(scored, val, lots)
    verdicts = [judge(one, args.precision, args.delta, args.max_per_class) for one in evidence]
    limits = np.array([verdict.threshold for verdict in verdicts])
    # Classes without a promise are those with more validation negatives up there than others: to pool them for that
    # reason errs on the careful side. What people rejected does not come back through the pool.
    refuted = np.array([contradicted(one, np.array([-np.inf]), args.precision, args.delta)[0] for one in evidence])
    pooled = np.isinf(limits) & ~refuted
    if not args.pool or val is None or pooled.sum() < 2:
        return Promises(limits, np.zeros_like(pooled), Verdict(), evidence)
    verdict = judge(pool_evidence(scored, val, np.flatnonzero(pooled)), args.precision, args.delta, args.max_per_class)
    # The pool as a whole keeps the promise; a class that does not by its own estimate is left out of it.
    at = np.array([verdict.threshold])
    good = np.array([estimated_precision(one, at)[0] >= args.precision for one in evidence])
    return Promises(limits, pooled & good, verdict, evidence)


_CHECKED = 30  # suggestions from which on a class's share of right ones says something


@dataclass
class Measured:
    """Right suggestions, all suggestions and hidden positives of every class, where the truth is known."""

    asked: float = 0.0
    right: np.ndarray = field(default_factory=lambda: np.zeros(0))
    made: np.ndarray = field(default_factory=lambda: np.zeros(0))
    hidden: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def facts(self) -> dict[str, float]:
        some, there, checked = self.made > 0, self.hidden > 0, self.made >= _CHECKED
        return {"precision": float(self.right.sum() / max(1, self.made.sum())),
                "recall": float(self.right.sum() / max(1, self.hidden.sum())),
                "class_precision": float((self.right[some] / self.made[some]).mean()) if some.any() else float("nan"),
                "class_recall": float((self.right[there] / self.hidden[there]).mean()) if there.any() else float("nan"),
                "hidden_positives": int(self.hidden.sum()), "checked_classes": int(checked.sum()),
                "short_classes": int((checked & (self.right < self.asked * self.made)).sum())}


def collect(scored: Scored, promises: Promises, truth: Sidecar | None, most_bad: float,
            asked: float) -> tuple[Suggestions, Measured]:
    source = scored.source
    found = Suggestions(source.index)
    counts, bad = np.zeros((3, source.classes), np.int64), []
    for shard, part, labels in scored.shards():
        bad += bad_of(part)
        unknown = scored.open_entries(shard, part["rows"], labels)
        chosen = promises.chosen(part["scores"], unknown)
        found.add(shard, part["rows"], part["scores"], chosen)
        if truth is not None:
            positive = truth.labels(shard).dense(source.classes, part["rows"]) == POSITIVE
            counts += np.stack([(chosen & positive).sum(0), chosen.sum(0), (positive & unknown).sum(0)])
    judge_bad(bad, int(source.counts.sum()), most_bad, source.index.url)
    return found, Measured(asked, *counts)
