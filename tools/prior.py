"""Estimates how frequent every class is: the mean score over a dataset under a model that ignored unknown labels.

  lacuna prior runs/oi-ignore                                  over its own training set, into runs/oi-ignore/prior.*
  lacuna prior runs/oi-ignore --shards s3://bucket/oi/train --out oi_prior --workers 8
  lacuna prior runs/coco-ignore --full-labels labels           also: how well it ranks the true frequencies
Writes OUT.csv (`Classes,avg_pred`, as the authors' code reads it) and OUT.json (also the naive prior: annotated
positives ÷ samples, which mirrors what annotators were asked, not what there is). method.prior of `csl` takes both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.datasets import training_set
from lacuna.tools.passes.parts import fingerprint_of
from lacuna.tools.passes.pool import PoolSettings, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import Arrays, bad_of, on_this_device, pass_facts, shard_rows
from lacuna.tools.passes.trained import Trained, held
from lacuna.tools.run_files import output_folder
from lacuna.trainer.evaluate import judge_bad
from lacuna.trainer.priors import write_prior


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint) or a checkpoint")
    parser.add_argument("--shards", metavar="URL", help="dataset to average over (default: the run's training set)")
    parser.add_argument("--labels", metavar="NAME", help="its sidecar, for the naive prior (default: the run's, or "
                        "`labels` with --shards)")
    parser.add_argument("--subset", metavar="NAME", help="only these rows (default: the run's, or all with --shards)")
    parser.add_argument("--full-labels", metavar="NAME", help="sidecar with all labels, to compare with the truth")
    parser.add_argument("--out", metavar="PATH", help="without ending (default: prior in the run's folder, or in "
                        "a folder here if the run is on object storage)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    settings = pool_settings(args)
    with held(args.model, settings.folder) as trained:
        source = training_set(trained, args.shards, args.labels, args.subset)
        truth = _full(source, args.full_labels)
        out = args.out or storage.join(output_folder(trained.run), "prior")
        found = estimate(trained, source, settings)
    facts = write(out, trained, source, found, truth)
    if args.json:
        print(json.dumps({"csv": f"{out}.csv", "json": f"{out}.json", **facts}))
        return
    print(f"{out}.csv, {out}.json: {source.classes} classes over {facts['samples']:,} samples; priors sum to "
          f"{found.prior.sum():.2f} positives an image, {np.sum(found.naive):.2f} are annotated")
    if facts["spearman"] is not None:
        print(f"Spearman correlation with the true frequencies: {_text(facts['spearman'])}; naive prior: "
              f"{_text(facts['spearman_naive'])}")


@dataclass(frozen=True)
class Prior:
    prior: np.ndarray  # float64 [L], mean score
    naive: np.ndarray  # float64 [L], annotated positives ÷ samples
    samples: int


@dataclass(frozen=True)
class PriorJob:
    """Parts with `sum` float64 [L] of the scores of a shard, and `rows`, `bad`."""

    trained: Trained
    source: ShardSource

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(job="prior", **pass_facts(self.trained, self.source))

    def build(self) -> Callable[[int], Arrays]:
        worker = on_this_device(self.trained, self.source)

        def work(shard: int) -> Arrays:
            scores, facts = worker.scores(shard)
            total = scores.sum(axis=0, dtype=np.float64) if len(scores) else np.zeros(self.source.classes)
            return {"sum": total, **facts}

        return work


def estimate(trained: Trained, source: ShardSource, settings: PoolSettings) -> Prior:
    """One pass over the shards; sums are added in shard order, so workers and restarts do not change a bit."""
    rows = shard_rows(source)
    with open_pool(settings) as pool:
        parts = pool.run(PriorJob(trained, source), rows, settings.folder(trained.run),
                         f"class priors of {source.index.url}")
    total, samples, bad = np.zeros(source.classes), 0, []
    for _, part in parts.read_all(list(rows)):
        total += part["sum"]
        samples += len(part["rows"])
        bad += bad_of(part)
    judge_bad(bad, sum(rows.values()), trained.config.data.max_bad_fraction, source.index.url)
    if not samples:
        raise UserError(f"{source.index.url}: no sample could be read.")
    if not settings.parts:
        parts.remove(list(rows))
    positives = source.sidecar.positives if source.subset is None else source.subset_counts()[0]
    return Prior(total / samples, positives / sum(rows.values()), samples)


def write(out: str, trained: Trained, source: ShardSource, found: Prior, truth: np.ndarray | None = None) -> dict:
    """Both files; the facts that the .json holds beside the numbers."""
    names = source.index.class_ids or source.index.classes
    if len(set(names)) != len(names):
        names = [f"{i}:{name}" for i, name in enumerate(names)]
        print("class names repeat: the files number them, and must be used with the same class list", file=sys.stderr)
    facts = {"samples": found.samples, "checkpoint": trained.checkpoint, **provenance(trained, source),
             "spearman": None if truth is None else spearman(found.prior, truth),
             "spearman_naive": None if truth is None else spearman(found.naive, truth)}
    columns = {"names": source.index.classes, "naive_prior": found.naive.tolist(),
               "true_frequency": None if truth is None else truth.tolist()}
    write_prior(f"{out}.csv", names, found.prior)
    write_prior(f"{out}.json", names, found.prior, {**facts, **columns})
    return facts


def provenance(trained: Trained, source: ShardSource) -> dict:
    """Says of a prior file whether it is still the one that this model and dataset give."""
    return {"weights": trained.digest, "index": source.index.fingerprint, "sidecar": source.sidecar.fingerprint,
            "subset": source.subset.fingerprint if source.subset else None}


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation; None where one of the two is constant."""
    from scipy.stats import rankdata

    x, y = rankdata(a), rankdata(b)
    if x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _full(source: ShardSource, name: str | None) -> np.ndarray | None:
    """float64 [L]: true frequencies."""
    if name is None:
        return None
    full = ShardSource(source.index, Sidecar.load(source.index, name), source.subset)
    if full.sidecar.unlisted != NEGATIVE:
        raise UserError(f"--full-labels {name}: this sidecar of {source.index.url} leaves labels unknown.")
    positives = full.sidecar.positives if full.subset is None else full.subset_counts()[0]
    return positives / int(source.counts.sum())


def _text(value: float | None) -> str:
    return "none (constant)" if value is None else f"{value:.3f}"
