"""Evaluates a checkpoint on shards (on Ray workers), or a file of any model's predictions.

  lacuna eval runs/my-run --shards shards/coco14/test --protocol multilabel --val shards/coco14/val \\
      --thresholds-out thresholds.json --csv classes.csv
  lacuna eval runs/oi/checkpoints/step-00012000 --shards s3://bucket/oi/test --protocol openimages --json
  lacuna eval runs/imagenet --shards shards/imagenet/val --protocol real --real real.json --val-labels val_labels.txt
  lacuna eval --protocol real --predictions classes.npy scores.npy --rows rows.txt --real real.json \\
      --val-labels val_labels.txt --synsets synsets.txt
Protocols:
  multilabel   fully labelled: mAP with both rules for classes without positives, also of images with k labels; mF1
  real         ImageNet's validation set with ReaL's label sets: top-1, top-5, ReaL top-1, mAP also by number of labels
               (images with an empty set count for the original top-k only)
  openimages, lvis   verified labels only: mAP(C), mAP(O) over classes with a positive and a negative, in 5 groups
ECE (multilabel): how far scores are from how often they are right, in 15 equal bins of every class, mean over classes,
for the scores as they are and, with --val, calibrated there: a rising curve per class, which changes no ranking.
Prediction files: scores.npy [N, L]; or the k best classes of every row, sorted or not: classes.npy scores.npy [N, k];
or a .npz or .parquet with `scores` (and `classes`, `key`). Classes that a row does not list count as 0, and the result
is marked `truncated`. Rows find their labels by name: --rows has a key or file name a line.
Equal scores: in top-1 and top-5 the lower class id comes first; in an AP all images of one score enter at once, as in
scikit-learn, so that their order does not matter.
--val-labels: class ids 0..999 in sorted-WNID order, one per validation image, or any ground-truth file that
`lacuna shards make imagenet` takes: WNIDs, devkit ids (with --meta), `file label` lines, Kaggle's CSV.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.readers.base import read_lines
from lacuna.data_pipelines.readers.ground_truth import WNID
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.eval import table as report
from lacuna.tools.eval.calibration import Calibration
from lacuna.tools.eval.measure import Measurement, Outcome, near_chance
from lacuna.tools.eval.pieces import from_parts, from_predictions
from lacuna.tools.eval.predictions import Predictions, read_predictions
from lacuna.tools.eval.thresholds import read_thresholds, write_thresholds
from lacuna.tools.eval.truth import IN_ORDER, Truth, ValLabels, class_order, folders_of, real_truth, shard_truth
from lacuna.tools.passes.datasets import add_val_arguments, open_dataset, val_set
from lacuna.tools.passes.pool import Pool, PoolSettings, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import ScoreJob, shard_rows
from lacuna.tools.passes.trained import Trained, held
from lacuna.trainer.methods import score_of
from lacuna.trainer.metrics.measures import RankingResult

PROTOCOLS = ("multilabel", "real", "openimages", "lvis")
_IMAGENET_CLASSES = 1000
Names = tuple[list[str], list[str]]  # class names, stable ids (may be empty)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint) or one "
                        "of its checkpoints/step-… folders")
    parser.add_argument("--protocol", required=True, choices=PROTOCOLS, help="what is measured, see below")
    parser.add_argument("--shards", metavar="URL", help="dataset to evaluate on: the folder that holds index.json")
    parser.add_argument("--labels", default="labels", metavar="NAME", help="its label sidecar (default: labels)")
    parser.add_argument("--subset", metavar="NAME", help="only these rows of it (default: all)")
    parser.add_argument("--predictions", nargs="+", metavar="FILE", help="scores of any model, instead of RUN")
    parser.add_argument("--rows", metavar="FILE", help=f"keys or file names of the predictions' rows, one per line; or "
                        f"the word {IN_ORDER}: validation numbers, or the order of the shards")
    parser.add_argument("--allow-missing", action="store_true", help="evaluate although some images have no prediction")
    parser.add_argument("--real", metavar="FILE", help="real.json: ReaL's label sets")
    parser.add_argument("--val-labels", metavar="FILE", help="ImageNet's original labels of val, see below")
    parser.add_argument("--meta", metavar="FILE", help="the devkit's meta.mat: --val-labels has devkit ids 1..1000")
    parser.add_argument("--synsets", metavar="FILE", help="WNID of every class of the predictions (default: sorted)")
    add_val_arguments(parser, "shards on which the threshold of every class is chosen (best F1)")
    parser.add_argument("--thresholds", metavar="FILE", help="thresholds of an earlier --thresholds-out")
    parser.add_argument("--thresholds-out", metavar="FILE", help="keep the thresholds for deployment (JSON)")
    parser.add_argument("--group-by", metavar="URL", help="order classes into groups by their positives in these "
                        "shards, e.g. the training set (default: the evaluated ones)")
    parser.add_argument("--group-sidecar", default="labels", metavar="NAME", help="their sidecar (default: labels)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--csv", metavar="FILE", help="AP, F1 and counts of every class")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    _check_flags(args)
    facts: dict = {"protocol": args.protocol, "shards": args.shards, "truncated": False}
    outcome, names = _of_predictions(args, facts) if args.predictions else _of_model(args, facts)
    warnings = facts.pop("warnings", [])
    problem = near_chance(outcome.result, outcome.numbers.get("top1"))
    warnings += [problem] if problem else []
    if args.csv:
        report.write_classes(args.csv, outcome, *names)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps({**facts, **report.as_json(outcome.numbers), "warnings": warnings}))
    else:
        print(report.table(outcome.numbers))


def _check_flags(args: argparse.Namespace) -> None:
    if bool(args.model) == bool(args.predictions):
        raise UserError("give a run folder or checkpoint, or else --predictions.")
    if args.model and not args.shards:
        raise UserError("--shards is needed: the dataset to evaluate on.")
    if args.protocol == "real" and not (args.real or args.shards):
        raise UserError("--real is needed: ReaL's label sets (real.json of google-research/reassessed-imagenet).")
    if args.protocol != "real" and not args.shards:
        raise UserError(f"--shards is needed: --protocol {args.protocol} takes its labels from them.")
    if args.protocol != "real" and (args.real or args.val_labels):
        raise UserError("--real and --val-labels belong to --protocol real.")
    if args.meta and not args.val_labels:
        raise UserError("--meta explains the devkit ids of --val-labels, which is not given.")
    if args.val and args.predictions:
        raise UserError("--val scores a validation set with a model: with --predictions, use --thresholds.")
    if args.val and args.thresholds:
        raise UserError("--val and --thresholds both give thresholds. Leave one out.")
    if args.thresholds_out and not args.val:
        raise UserError("--thresholds-out needs --val: thresholds are chosen on a validation set.")


def _of_model(args: argparse.Namespace, facts: dict) -> tuple[Outcome, Names]:
    settings = pool_settings(args)
    with held(args.model, settings.folder) as trained:
        return _of_trained(trained, settings, args, facts)


def _of_trained(trained: Trained, settings: PoolSettings, args: argparse.Namespace, facts: dict
                ) -> tuple[Outcome, Names]:
    source = open_dataset(trained, args.shards, args.labels, args.subset)
    _check_labels(source, args.protocol, bool(args.real))
    real = real_truth(args.real, _val_labels(args, source.index.class_ids), source.classes) if args.real else None
    val = val_set(trained, args)
    facts |= {"checkpoint": trained.checkpoint, "weights": trained.digest[:16],
              "labels": source.sidecar.fingerprint if real is None else args.real}
    if not trained.classes:
        facts["warnings"] = [f"{trained.run} does not tell its class list any more: only the number was compared"]
    names = (source.index.classes, source.index.class_ids)
    with open_pool(settings) as pool:
        thresholds, calibration = _thresholds(args, names), None
        if val is not None:
            known = _score(pool, settings, trained, val, None, None)
            chosen, calibration = known.collector.result(), known.odds.fit()
            thresholds = chosen.classes.thresholds
            facts["thresholds_from"] = args.val
            _keep_thresholds(args, chosen, names, trained)
        measured = _score(pool, settings, trained, source, thresholds, real, calibration)
    return _measure(measured, args, source, real is not None and real.originals is not None), names


def _score(pool: Pool, settings: PoolSettings, trained: Trained, source: ShardSource, thresholds: np.ndarray | None,
           real: Truth | None, calibration: Calibration | None = None) -> Measurement:
    rows = shard_rows(source)
    parts = pool.run(ScoreJob(trained, source), rows, settings.folder(trained.run), f"scoring {source.index.url}")
    most_bad = trained.config.data.max_bad_fraction
    pieces = from_parts(parts, source, most_bad, real)
    measured = Measurement(source.classes, thresholds, calibration).add_all(pieces)
    if not settings.parts:
        parts.remove(list(rows))
    return measured


def _of_predictions(args: argparse.Namespace, facts: dict) -> tuple[Outcome, Names]:
    predictions = read_predictions(args.predictions)
    source = None
    if args.protocol == "real" and args.real:
        predictions, truth, keys = _real_rows(args, predictions)
    else:
        source = ShardSource.load(args.shards, args.labels, args.subset)
        _check_labels(source, args.protocol, False)
        truth = shard_truth(source)
        keys = _keys(args, predictions, truth)
        predictions.check(len(truth.classes))
    rows = truth.rows_of(keys, args.rows or predictions.where, args.allow_missing)
    facts |= {"predictions": args.predictions, "truncated": predictions.truncated}
    if predictions.truncated:
        listed = predictions.scores.shape[1]
        facts["warnings"] = [f"truncated: {listed} of {len(truth.classes)} classes are listed a row, the others count "
                             "as 0: this is not the mAP of all scores"]
    if predictions.rounded:
        facts.setdefault("warnings", []).append("scores are float64: they were rounded to float32, which may tie some")
    names = (truth.classes, truth.class_ids)
    measured = Measurement(len(truth.classes), _thresholds(args, names))
    measured.add_all(from_predictions(predictions, truth, rows))
    tops = tuple(k for k in (1, 5) if k <= predictions.scores.shape[1])
    return _measure(measured, args, source, truth.originals is not None, tops), names


def _measure(measured: Measurement, args: argparse.Namespace, source: ShardSource | None, originals: bool,
             tops: tuple[int, ...] = (1, 5)) -> Outcome:
    if args.protocol == "multilabel":
        return measured.multilabel()
    if args.protocol == "real":
        return measured.real(tops, originals)
    assert source is not None
    frequency = source.sidecar.positives if source.subset is None else source.subset_counts()[0]
    if args.group_by:
        other = ShardSource.load(args.group_by, args.group_sidecar, None)
        if other.index.classes != source.index.classes:
            raise UserError(f"--group-by {args.group_by}: its classes are not those of {args.shards}.")
        frequency = other.sidecar.positives
    return measured.partial(frequency)


def _real_rows(args: argparse.Namespace, predictions: Predictions) -> tuple[Predictions, Truth, list[str]]:
    """ReaL's labels, the predictions in ReaL's class order, and the name of every row."""
    wnids: list[str] = []
    if args.synsets:
        wnids, order = class_order(args.synsets)
        predictions.check(len(wnids))
        predictions = predictions.in_order_of(order)
    classes = len(wnids) or _IMAGENET_CLASSES
    predictions.check(classes)
    truth = real_truth(args.real, _val_labels(args, wnids), classes)
    keys = _keys(args, predictions, truth)
    folders = sorted({key.split("/")[-2] for key in keys if "/" in key})
    if not wnids and len(folders) == classes:
        wnids = folders
    labels = folders_of(keys, wnids)
    if labels is None:
        return predictions, _named(truth, wnids), keys
    rows = truth.rows_of(keys, args.rows or predictions.where, args.allow_missing)
    if truth.originals is None:
        originals = np.full(len(truth.keys), -1, np.int64)
        originals[rows] = labels
        truth = Truth(truth.where, truth.keys, truth.labels, truth.classes, truth.class_ids, originals)
    elif (truth.originals[rows] != labels).any():
        row = int(np.argmax(truth.originals[rows] != labels))
        raise UserError(f"--val-labels {args.val_labels}: says class {truth.originals[rows[row]]} for {keys[row]!r}, "
                        f"whose folder is class {labels[row]}. Class ids must be in sorted-WNID order.")
    return predictions, _named(truth, wnids), keys


def _val_labels(args: argparse.Namespace, class_ids: list[str]) -> ValLabels | None:
    if args.val_labels is None:
        return None
    wnids = class_ids if class_ids == sorted(class_ids) and all(map(WNID.fullmatch, class_ids)) else []
    return ValLabels(args.val_labels, wnids, args.meta)


def _named(truth: Truth, wnids: list[str]) -> Truth:
    return Truth(truth.where, truth.keys, truth.labels, wnids or truth.classes, wnids, truth.originals)


def _keys(args: argparse.Namespace, predictions: Predictions, truth: Truth) -> list[str]:
    if args.rows == IN_ORDER:
        keys = truth.keys[: len(predictions)]
    elif args.rows:
        keys = [line.strip() for line in read_lines(args.rows)]
    elif predictions.keys is not None:
        keys = predictions.keys
    else:
        raise UserError(f"--rows is needed: a file with the image of every row of {predictions.where}, one per line "
                        f"(or `--rows {IN_ORDER}` if they are in the order of {truth.where}).")
    if len(keys) != len(predictions):
        raise UserError(f"--rows {args.rows}: {len(keys):,} rows, {predictions.where} has {len(predictions):,}.")
    return keys


def _check_labels(source: ShardSource, protocol: str, real: bool) -> None:
    """A class whose only annotations are positives has AP 1, whatever the scores."""
    full = source.sidecar.unlisted == NEGATIVE
    if protocol == "multilabel" and not full:
        raise UserError(f"{source.index.url}: sidecar {source.sidecar.name!r} leaves labels unknown; --protocol "
                        "multilabel needs all of them. Use --protocol openimages for verified labels only.")
    if protocol == "real" and not real and not full:
        raise UserError(f"{source.index.url}: sidecar {source.sidecar.name!r} holds no ReaL label sets. Give --real "
                        "real.json (and --val-labels for the original top-1).")
    if not source.sidecar.positives.any() and not real:
        raise UserError(f"{source.index.url}: sidecar {source.sidecar.name!r} has no positive label at all.")


def _thresholds(args: argparse.Namespace, names: Names) -> np.ndarray | None:
    return read_thresholds(args.thresholds, *names) if args.thresholds else None


def _keep_thresholds(args: argparse.Namespace, chosen: RankingResult, names: Names, trained: Trained) -> None:
    if args.thresholds_out:
        source = {"chosen_on": args.val, "checkpoint": trained.checkpoint, "weights": trained.digest}
        write_thresholds(args.thresholds_out, chosen, *names, score_of(trained.config.method).rule, source)
