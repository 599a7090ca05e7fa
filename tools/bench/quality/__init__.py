"""Which method closes how much of the gap between partial and full labels, on real COCO images.

  lacuna bench quality --data DIR                              everything, 3 seeds (hours; the same command goes on)
  lacuna bench quality --data DIR --sets features --methods oracle an role --seeds 1
  lacuna bench quality --quick                                 without DIR: on a small generated set
DIR (or LACUNA_EVAL_DATA) holds coco_features/ and coco_photos/. Sets:
  features   a linear layer on fixed features, one published positive per image, heads as the papers have them
  features_tuned  the same with the head's recipe for every method: bias at the prior, norm, decay
  features_full300  the tuned recipe with 300 fully labelled images in the loss
  fpc300     the same features, 300 positives and 300 negatives of every class annotated (CSL)
  pos10      the same features, 10 % of the positives and about as many negatives annotated (Soft Exposure)
  fpc300_tuned, pos10_tuned  the same two with the head's recipe, a few methods
  photos     heads on a frozen EfficientNet-lite0 over random-resized crops, one positive per image (EN, CL, SCL)
  photos_last    the same crops; after a warm-up the last blocks learn with the head (AN, EN, EN+SCL)
  photos_tuned, photos_last_tuned  the same two with the head's recipe for every method; the last block learns only
Every set is a table (`lacuna table`): a method's row has the same number of trials as any other, chosen by mAP on
held-out training images with seed 0 and without the test set; the best is run with every seed and then tested.
Methods that want a vision-language model's table get the scores of a classifier trained with AN (or, under names with
_role, with ROLE) on the same labels. Gap closed = (method − low) / (oracle − low): oracle = full labels, low = AN
(fpc300: Ignore, pos10: NE).
spearman = rank correlation of a class's mean prediction over the training images with its true frequency;
spearman_hidden = the same among the classes whose annotations were cut to the same number, which then tell nothing;
spearman_annotations = that of the numbers of annotated positives alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.tools.bench.quality.data import prepare
from lacuna.tools.bench.quality.features import FeatureRows
from lacuna.tools.bench.quality.generated import generate
from lacuna.tools.bench.quality.lite0 import lite0_weights
from lacuna.tools.bench.quality.photos import PHOTO_SETS, PhotoRows
from lacuna.tools.bench.quality.trials import ANNOTATIONS
from lacuna.tools.passes.pool import PoolSettings, ray_room
from lacuna.tools.prior import spearman
from lacuna.tools.table.rows import RowWork
from lacuna.tools.trials.crew import CrewSettings
from lacuna.tools.trials.job import Outcome

_VAL_FRACTIONS = {"coco_features": 0.2, "coco_photos": 0.15}
SETS = (*ANNOTATIONS, *PHOTO_SETS)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("LACUNA_EVAL_DATA"),
                        help="folder with coco_features/ and coco_photos/ (default: LACUNA_EVAL_DATA)")
    parser.add_argument("--out", default="runs/quality", help="shards and results (default: runs/quality)")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, metavar="SET",
                        help=f"default: {' '.join(SETS)}")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: all of the set")
    parser.add_argument("--seeds", type=int, help="how many: default 3, quick: 1")
    parser.add_argument("--first-seed", type=int, default=0, help="default 0")
    parser.add_argument("--epochs", type=int, help="of a trial on features: default 15, quick: 2")
    parser.add_argument("--crops", type=int, default=8, help="photos: crops of a photo that epochs take in turn, "
                        "each seen once by the backbone")
    parser.add_argument("--workers", type=int, metavar="N", help="trainings at a time (default: one per GPU, or one "
                        "per core; 0: in this process)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    seeds = range(args.first_seed, args.first_seed + (args.seeds or (1 if quick else 3)))
    epochs = args.epochs or (2 if quick else 15)
    sets = ["features"] if quick else args.sets
    for name in sets:
        _legal(args.methods, PHOTO_SETS[name].trials if name in PHOTO_SETS else ANNOTATIONS[name].trials)
        if name in ANNOTATIONS:
            _check(name, args.methods)
    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers {args.workers}: must be 0 or more.")
    if quick and args.workers is None:
        args.workers = 0  # starting Ray would take longer
    if quick and not args.data:
        args.data, epochs = generate(os.path.join(args.out, "generated")), args.epochs or 4
    table: dict[str, dict] = {}
    linear = [name for name in sets if name in ANNOTATIONS]
    if len(linear) < len(sets):
        lite0_weights(args.out)  # what is lacking is said before hours of training
    if linear:
        features = FeatureRows(_shards(args, "coco_features"), args.out, epochs, CrewSettings(args.workers))
        methods = ["an", "oracle"] if quick else args.methods
        # One Ray for all of it, if any.
        with contextlib.nullcontext() if args.workers == 0 else ray_room(PoolSettings(args.workers)):
            for name in linear:
                table[name] = _compare(features, name, methods, seeds, 2 if quick else None)
    for name in sets:
        if name in PHOTO_SETS:
            table[name] = _photos(args, name, seeds)
    return {"ratios": {f"{name}.{method}": row["gap_closed"] for name, rows in table.items()
                       for method, row in rows.items()}, "table": table}


def _shards(args: argparse.Namespace, name: str) -> str:
    source = os.path.join(args.data or "", name)
    if not args.data or not os.path.isdir(source):
        raise UserError(f"--data {args.data!r}: no folder {name} in it. Give --data or set LACUNA_EVAL_DATA; --quick "
                        "without either generates its own.")
    return prepare(source, args.out, _VAL_FRACTIONS[name])


def _compare(features: FeatureRows, name: str, methods: list[str] | None, seeds: range,
             most: int | None) -> dict[str, dict]:
    """The table of one annotation; `most` cuts the number of trials."""
    annotation = ANNOTATIONS[name]
    tried = {method: annotation.trials[method] for method in methods or annotation.trials}
    if most:  # those that learn in few epochs
        tried = {method: sorted(trials, key=lambda trial: -trial["lr"])[:most] for method, trials in tried.items()}
    rows = features.train(name, annotation, tried, seeds)
    scores = _scores(name, rows, tried, seeds)
    extra: dict[str, dict] = {}
    for method, row in rows.items():
        if method in annotation.priors:
            means = np.array([features.prior(row.folders[seed], annotation.labels) for seed in seeds])
            truth, told = (features.source(labels).subset_counts()[0] for labels in ("labels", annotation.labels))
            extra[method] = rank_correlations(means, truth, told)
    return {method: row | extra.get(method, {}) for method, row in gaps(scores, annotation.low).items()}


def _check(name: str, methods: list[str] | None) -> None:
    for method, other in ANNOTATIONS[name].after.items():
        if methods and method in methods and other not in methods:
            raise UserError(f"--methods {method} needs the prior of {other}: name that one, too.")


def _finished(name: str, outcomes: list[Outcome]) -> list[float]:
    """Test mAP of every seed."""
    for outcome in outcomes:
        if outcome.status != "finished":
            raise UserError(f"{name}: {outcome.reason}")
    return [outcome.results["test"]["map"] for outcome in outcomes]


def rank_correlations(means: np.ndarray, truth: np.ndarray, told: np.ndarray) -> dict[str, float | None]:
    """Of mean predictions [seeds, L] with the true frequencies [L], averaged over the seeds; None: undefined.

    told: annotated positives [L]; how well they alone rank the classes is `spearman_annotations`.
    """
    rows: dict[str, float | None] = {}
    for name, guesses, which in (("spearman", means, told >= 0), ("spearman_hidden", means, told == told.max()),
                                 ("spearman_annotations", told[None], told >= 0)):
        found = [spearman(guess[which], truth[which]) for guess in guesses]
        rows[name] = None if None in found else round(float(np.mean(np.array(found, float))), 3)
    return rows


def _photos(args: argparse.Namespace, name: str, seeds: range) -> dict[str, dict]:
    kind = PHOTO_SETS[name]
    photos = PhotoRows(_shards(args, "coco_photos"), args.out, os.path.abspath(lite0_weights(args.out)), args.crops,
                       CrewSettings(args.workers))
    methods = args.methods or list(kind.trials)
    return gaps(_scores(name, photos.train(name, kind, methods, seeds), kind.trials, seeds), "an")


def _scores(name: str, rows: dict[str, RowWork], tried: dict[str, list[dict]], seeds: range) -> dict[str, list[float]]:
    """method → test mAP of every seed."""
    scores: dict[str, list[float]] = {}
    for method, row in rows.items():
        if row.missing or row.chosen is None:
            raise UserError(f"{name}.{method}: {row.missing or 'not trained'}")
        scores[method] = _finished(f"{name}.{method}", [row.outcomes[seed] for seed in seeds])
        _say(method, scores[method], tried[method][row.chosen])
    return scores


def _legal(methods: list[str] | None, trials: dict) -> list[str]:
    for method in methods or ():
        if method not in trials:
            raise UserError(f"--methods {method}: legal for this set are {', '.join(trials)}.")
    return methods or list(trials)


def _say(method: str, scores: list[float], best: dict) -> None:
    print(f"{method:<14} {np.mean(scores):6.2f} ± {np.std(scores):.2f}   {json.dumps(best)}", flush=True)


def gaps(scores: dict[str, list[float]], low: str) -> dict[str, dict]:
    """{"map", "std", "gap_closed"} of every method; without `low` and `oracle` among them there is no gap (null)."""
    means = {method: float(np.mean(s)) for method, s in scores.items()}
    known = low in means and "oracle" in means
    return {method: {"map": round(means[method], 2), "std": round(float(np.std(s)), 2),
                     "gap_closed": round((means[method] - means[low]) / (means["oracle"] - means[low]), 3)
                     if known else None} for method, s in scores.items()}
