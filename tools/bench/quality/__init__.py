"""Which method closes how much of the gap between partial and full labels, on real COCO images.

  lacuna bench quality --data DIR                              everything, 3 seeds (hours; the same command goes on)
  lacuna bench quality --data DIR --sets features --methods oracle an role --seeds 1
  lacuna bench quality --data DIR --sets features --trial '{"lr": 1e-4, "method": {"name": "role", "lr": 0.03}}'
  lacuna bench quality --quick                                 without DIR: on a small generated set
DIR (or LACUNA_EVAL_DATA) holds coco_features/ and coco_photos/. Sets:
  features   a linear layer on fixed features, one published positive per image, heads as the papers have them
  features_tuned  the same with the head's recipe for every method: bias at the prior, norm, decay
  fpc300     the same features, 300 positives and 300 negatives of every class annotated (CSL)
  pos10      the same features, 10 % of the positives and about as many negatives annotated (Soft Exposure)
  photos     heads on a frozen EfficientNet-lite0 over random-resized crops, one positive per image (EN, CL, SCL)
  photos_tuned   the same crops; after a warm-up the last blocks learn with the head (AN, EN, EN+SCL)
Every method of a set has the same number of trials, chosen by mAP on held-out training images with the first seed (one
that cannot reach the best before it, even at its last epoch's rate, is given up); the best is run with every seed and
then tested. Methods that want a vision-language model's table get the scores of a classifier trained with AN (or, under
names with _role, with ROLE) on the same labels. Gap closed = (method − low) / (oracle − low): oracle = full labels,
low = AN (fpc300: Ignore, pos10: NE).
spearman = rank correlation of a class's mean prediction over the training images with its true frequency;
spearman_hidden = the same among the classes whose annotations were cut to the same number, which then tell nothing;
spearman_annotations = that of the numbers of annotated positives alone.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.tools.bench.quality.crops import Views, lite0_weights
from lacuna.tools.bench.quality.data import prepare
from lacuna.tools.bench.quality.features import Trials
from lacuna.tools.bench.quality.generated import generate
from lacuna.tools.bench.quality.photos import PHOTO_TRIALS, TUNED_TRIALS, PhotoTrials, TunedTrials
from lacuna.tools.bench.quality.trials import ANNOTATIONS, Annotation
from lacuna.tools.prior import spearman

_VAL_FRACTIONS = {"coco_features": 0.2, "coco_photos": 0.15}
_PHOTO_SETS: dict[str, tuple[type[PhotoTrials], dict]] = {"photos": (PhotoTrials, PHOTO_TRIALS),
                                                          "photos_tuned": (TunedTrials, TUNED_TRIALS)}
SETS = (*ANNOTATIONS, *_PHOTO_SETS)


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
    parser.add_argument("--crops", type=int, default=8, help="photos: crops of a photo that epochs take in turn")
    parser.add_argument("--trial", metavar="JSON", help="train only this one, on the first of --sets, with every seed")


def run(quick: bool, args: argparse.Namespace) -> dict:
    seeds = range(args.first_seed, args.first_seed + (args.seeds or (1 if quick else 3)))
    epochs = args.epochs or (2 if quick else 15)
    sets = ["features"] if quick else args.sets
    trial = _trial(args.trial) if args.trial else None
    for name in sets:
        _legal(args.methods, _PHOTO_SETS[name][1] if name in _PHOTO_SETS else ANNOTATIONS[name].trials)
    if quick and not args.data:
        args.data, epochs = generate(os.path.join(args.out, "generated")), args.epochs or 4
    table: dict[str, dict] = {}
    linear = [name for name in sets if name in ANNOTATIONS]
    if len(linear) < len(sets):
        lite0_weights(args.out)  # what is lacking is said before hours of training
    if linear:
        trials = Trials(_shards(args, "coco_features"), args.out, epochs)
        try:
            if trial:
                return _one_trial(trials, ANNOTATIONS[linear[0]], trial, seeds)
            methods = ["an", "oracle"] if quick else args.methods
            for name in linear:
                table[name] = _compare(trials, ANNOTATIONS[name], methods, seeds, 2 if quick else None)
        finally:
            trials.close()
    for name in sets:
        if name in _PHOTO_SETS:
            table[name] = _photos(args, seeds, *_PHOTO_SETS[name])
    return {"ratios": {f"{name}.{method}": row["gap_closed"] for name, rows in table.items()
                       for method, row in rows.items()}, "table": table}


def _shards(args: argparse.Namespace, name: str) -> str:
    source = os.path.join(args.data or "", name)
    if not args.data or not os.path.isdir(source):
        raise UserError(f"--data {args.data!r}: no folder {name} in it. Give --data or set LACUNA_EVAL_DATA; --quick "
                        "without either generates its own.")
    return prepare(source, args.out, _VAL_FRACTIONS[name])


def _trial(text: str) -> dict:
    try:
        trial = json.loads(text)
        missing = {"lr", "method"} - set(trial)
    except (ValueError, TypeError) as error:
        raise UserError(f"--trial {text!r}: not a JSON object ({error}).") from None
    if missing:
        raise UserError(f"--trial {text!r}: needs the keys lr and method (with its name).")
    return trial


def _one_trial(trials: Trials, annotation: Annotation, trial: dict, seeds: range) -> dict:
    found = [trials.score(annotation, "trial", trial, seed) for seed in seeds]
    return {"ratios": {}, "trial": trial, "runs": [{k: f[k] for k in ("val", "test", "curve")} for f in found]}


def _compare(trials: Trials, annotation: Annotation, methods: list[str] | None, seeds: range,
             most: int | None) -> dict[str, dict]:
    """The table of one annotation; `most` cuts the number of trials."""
    scores: dict[str, list[float]] = {}
    extra: dict[str, dict] = {}
    for method in _legal(methods, annotation.trials):
        if method in annotation.after and annotation.after[method] not in scores:
            raise UserError(f"--methods {method} needs the prior of {annotation.after[method]}: name that one before.")
        tried = annotation.trials[method]
        if most:  # those that learn in few epochs
            tried = sorted(tried, key=lambda trial: -trial["lr"])[:most]
        best = trials.choose(annotation, method, tried, seeds[0])
        found = [trials.score(annotation, method, best, seed) for seed in seeds]
        scores[method] = [f["test"] for f in found]
        if method in annotation.priors:
            for seed, f in zip(seeds, found, strict=True):
                trials.write_prior(annotation.labels, method, seed, f["means"])
            truth, told = (trials.source(labels).subset_counts()[0] for labels in ("labels", annotation.labels))
            extra[method] = rank_correlations(np.array([f["means"] for f in found]), truth, told)
        _say(method, scores[method], best)
    return {method: row | extra.get(method, {}) for method, row in gaps(scores, annotation.low).items()}


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


def _photos(args: argparse.Namespace, seeds: range, kind: type[PhotoTrials], trials: dict) -> dict[str, dict]:
    folder = os.path.join(args.out, "photos")
    shards = _shards(args, "coco_photos")
    views = Views(shards, folder, lite0_weights(args.out), args.crops)
    views.make()
    photos = kind(shards, folder, views)
    scores: dict[str, list[float]] = {}
    last: dict[str, dict] = {}
    for method in _legal(args.methods, trials):
        best = max(trials[method], key=lambda trial: photos.score(method, trial, seeds[0])["val"])
        found = [photos.score(method, best, seed) for seed in seeds]
        scores[method] = [f["test"] for f in found]
        last[method] = {"map_last_epoch": round(float(np.mean([f["last_test"] for f in found])), 2)}
        _say(method, scores[method], best)
    return {method: row | last[method] for method, row in gaps(scores, "an").items()}


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
