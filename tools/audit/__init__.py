"""What is wrong with a dataset, as a trained model sees it: one page to look through, and the same as JSON.

  lacuna audit runs/my-run                                  writes RUN/audit.html and RUN/audit.json
  lacuna audit runs/my-run --out audit.html --json          the JSON also goes to the terminal
  lacuna audit runs/my-run --near 0.2 --few 50
Looked for, in the run's training, validation and test set:
  likely wrong annotations   positives that the model believes no more than a usual negative, and the reverse
  leaks                      samples of val or test that are in the training set too (nearly the same features)
  near-duplicates, outliers  in the training set, by the model's features
  confused classes           b is believed more than a where a is there and b is not; needs full labels in val
  too few labels             classes with less than --few annotated positives
Near means: at most --near of the usual (median) distance between nearest neighbours. The exit code is 1 if there are
leaks, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.tools.audit.labels import class_levels, confused, doubtful, too_few
from lacuna.tools.audit.likeness import NEIGHBORS, nearest, outliers, twins
from lacuna.tools.audit.page import SECTIONS, render
from lacuna.tools.audit.splits import Split, look_at
from lacuna.tools.passes.datasets import open_dataset
from lacuna.tools.passes.pool import add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.trained import held
from lacuna.tools.run_files import output_folder, run_name

_ALWAYS = 0.5  # of the samples with one class and without another: from here on they are confused
_OUTLYING = 8.0  # spreads above the median


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint), or a checkpoint")
    parser.add_argument("--out", metavar="FILE", help="page to write, JSON beside it (default: RUN/audit.html)")
    parser.add_argument("--near", type=float, default=0.1, help="near-duplicates: at most so much of the usual "
                        "distance between nearest neighbours (default 0.1)")
    parser.add_argument("--few", type=int, default=20, help="classes with less annotated positives (default 20)")
    parser.add_argument("--most", type=int, default=100, help="findings of a kind that are listed (default 100)")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    settings = pool_settings(args)
    with held(args.model, settings.folder) as trained, open_pool(settings) as pool:
        data = trained.config.data
        splits = {name: open_dataset(trained, part.url, part.labels, part.subset) for name, part in (
            ("train", data.train), ("val", data.val), ("test", data.test)) if part is not None}
        looked = {name: look_at(pool, settings, trained, source, name) for name, source in splits.items()}
    absent: dict[str, str] = {}
    findings = {kind: list[dict]() for kind in SECTIONS}
    _about_labels(findings, absent, looked, args)
    _about_likeness(findings, looked, args)
    totals = {kind: len(rows) for kind, rows in findings.items()}
    shown = {kind: rows[: args.most] for kind, rows in findings.items()}
    counts = ", ".join(f"{len(split.rows):,} {name}" for name, split in looked.items())
    facts = {"summary": f"{counts} samples, {splits['train'].classes} classes, seen by "
             f"{os.path.basename(trained.checkpoint)}.", "absent": absent}
    out = args.out or os.path.join(output_folder(trained.run), "audit.html")
    storage.write_atomic(out, render(run_name(trained.run), facts, shown, totals, splits).encode())
    body = json.dumps({"run": trained.run, **facts, "totals": totals, "findings": shown})
    storage.write_atomic(os.path.splitext(out)[0] + ".json", body.encode())
    print(body if args.json else _text(out, totals, absent))
    return int(bool(totals["leaks"]))


def _check(args: argparse.Namespace) -> None:
    if args.out and not args.out.endswith(".html"):
        raise UserError(f"--out {args.out}: a page is written, so the name must end with .html.")
    if not 0 <= args.near < 1:
        raise UserError(f"--near {args.near}: legal are numbers from 0 to below 1, such as 0.1.")
    for option in ("few", "most"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option} {getattr(args, option)}: at least 1 is needed.")


def _text(out: str, totals: dict[str, int], absent: dict[str, str]) -> str:
    lines = [f"{out}:"]
    for kind, (heading, _) in SECTIONS.items():
        lines.append(f"  {heading}: {absent.get(kind) or totals[kind]}")
    return "\n".join(lines)


def _about_labels(findings: dict[str, list[dict]], absent: dict[str, str], looked: dict[str, Split],
                  args: argparse.Namespace) -> None:
    train = looked["train"]
    names = train.source.index.classes
    found = []
    # Validation negatives say what a usual belief in an absent class is; single-positive training labels have none.
    for split in looked.values():
        rows, classes, doubts = doubtful(split.scores, split.labels, _levels(split, looked))
        found += [(float(doubt), {"sample": split.place(row), "class": names[cls], "annotated": split.word(row, cls),
                                  "belief": float(split.scores[row, cls])})
                  for row, cls, doubt in zip(rows.tolist(), classes.tolist(), doubts, strict=True)]
    findings["wrong"] = [row for _, row in sorted(found, key=lambda pair: -pair[0])]
    full = next((looked[name] for name in ("val", "test") if name in looked
                 and looked[name].source.sidecar.unlisted == NEGATIVE), None)
    if full is None:
        absent["confused"] = "Needs a validation or test set with full labels."
    else:
        findings["confused"] = [{"there": names[a], "believed": names[b], "share": share, "samples": count}
                                for a, b, share, count in confused(full.scores, full.labels, _ALWAYS)]
    positives = (train.labels == POSITIVE).sum(axis=0)
    findings["few"] = [{"class": names[cls], "annotated_positives": count}
                       for cls, count in too_few(positives, args.few)]


def _levels(split: Split, looked: dict[str, Split]) -> tuple[np.ndarray, np.ndarray] | None:
    """Of a split without negatives, those of the next one that has them."""
    own = class_levels(split.scores, split.labels)
    for other in looked.values():
        lent = class_levels(other.scores, other.labels)
        own = (np.where(np.isnan(own[0]), lent[0], own[0]), np.where(np.isnan(own[1]), lent[1], own[1]))
    return own


def _about_likeness(findings: dict[str, list[dict]], looked: dict[str, Split], args: argparse.Namespace) -> None:
    train = looked["train"]
    k = min(NEIGHBORS, max(1, len(train.rows) - 1))
    with Progress(sum(len(split.rows) for split in looked.values()), "comparing", "samples") as meter:
        places, distances = nearest(train.features, train.features, k, True, meter.advance)
        usual = float(np.median(distances[:, 0])) if len(distances) else 0.0
        pairs = [(a, b, far) for a, b, far in twins(places, distances, args.near * usual) if a < b or
                 not (places[b] == a).any()]
        findings["duplicates"] = [{"sample": train.place(a), "other": train.place(b), "distance": far}
                                  for a, b, far in pairs]
        rows, away = outliers(distances, _OUTLYING)
        findings["outliers"] = [{"sample": train.place(row), "spreads": float(far)}
                                for row, far in zip(rows.tolist(), away, strict=True)]
        leaks: list[dict[str, Any]] = []
        for first, second in (("val", "train"), ("test", "train"), ("test", "val")):
            if first in looked and second in looked:
                a, b = looked[first], looked[second]
                found = nearest(a.features, b.features, min(NEIGHBORS, len(b.rows)), False,
                                meter.advance if second == "train" else lambda _: None)
                leaks += [{"sample": a.place(i), "other": b.place(j), "distance": far}
                          for i, j, far in twins(*found, args.near * usual)]
    findings["leaks"] = sorted(leaks, key=lambda row: row["distance"])
