"""Train the head of a finished run again, class by class, on known labels alone (category-wise fine-tuning).

  lacuna refit runs/oi-an                              writes the run runs/oi-an-refit
  lacuna refit runs/oi-an --out runs/better --labels verified
  lacuna refit runs/oi-an --loss bce --lr 1e-3 --steps 500
For runs that assumed something about unknown labels (AN, ROLE, …): the backbone keeps what it learnt, every class's row
of the head is corrected by the labels that are known. A class needs a known positive and a known negative in the
training and in the validation set; the row with the best validation average precision is kept, so none gets worse
there. What a phase of the run has cached (phases.N.cache) is not computed again. The new run can be evaluated,
exported, explored and compared like any other, but not trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.cached import cached_view
from lacuna.tools.passes.datasets import add_val_arguments, open_dataset, training_set, val_set
from lacuna.tools.passes.parts import fingerprint_of
from lacuna.tools.passes.pool import Pool, PoolSettings, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import Arrays, bad_of, on_this_device, pass_facts, shard_rows
from lacuna.tools.passes.trained import Trained, held, read_weights
from lacuna.tools.refit.fitting import Recipe, Refitted, Samples, refit
from lacuna.tools.refit.writing import write_run
from lacuna.trainer.evaluate import judge_bad
from lacuna.trainer.models.classifier import Classifier


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint), or a checkpoint")
    parser.add_argument("--out", metavar="FOLDER", help="the new run (default: RUN-refit)")
    parser.add_argument("--labels", metavar="NAME", help="sidecar of the training set (default: the run's)")
    add_val_arguments(parser, "validation shards with known labels (default: the run's)")
    parser.add_argument("--loss", choices=["asl", "bce"], default="asl", help="default: asl, as published")
    parser.add_argument("--lr", type=float, default=1e-4, help="of Adam (default 1e-4, as published)")
    parser.add_argument("--steps", type=int, default=5000, help="at most so many, each over all samples (default 5000)")
    parser.add_argument("--patience", type=int, default=300, help="a class stops after so many steps without a better "
                        "validation precision (default 300)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if not args.lr > 0 or args.steps < 1 or args.patience < 1:
        raise UserError(f"--lr {args.lr}, --steps {args.steps}, --patience {args.patience}: all must be above 0.")
    settings = pool_settings(args)
    with held(args.model, settings.folder) as trained, open_pool(settings) as pool:
        model = trained.config.model
        if model.boost != 1 or model.head != "linear":
            raise UserError(f"{trained.run}: model.head = {model.head}, model.boost = {model.boost}: its logits come "
                            "from score maps, so rows cannot be trained on pooled features. Use a run with "
                            "model.head=linear and model.boost=1.")
        out = (args.out or f"{trained.run}-refit").rstrip("/")
        train = training_set(trained, None, args.labels)
        own = trained.config.data.val
        val = val_set(trained, args) or (open_dataset(trained, own.url, own.labels, own.subset) if own else None)
        if val is None:
            raise UserError(f"{trained.run} has no validation set: name one with --val URL.")
        weights = read_weights(trained)
        found = refit(weights["head.weight"].float(), weights["head.bias"].float(),
                      _samples(pool, settings, trained, train), _samples(pool, settings, trained, val),
                      Recipe(args.loss, args.lr, args.steps, args.patience))
        weights |= {"head.weight": found.weight.to(weights["head.weight"]),
                    "head.bias": found.bias.to(weights["head.bias"])}
        write_run(out, trained, weights, _facts(found, trained))
    report = {"run": out, **_facts(found, trained)}
    if args.json:
        print(json.dumps(report))
        return
    print(f"{out}: {report['refitted']} of {len(found.before)} classes were refitted; validation mAP "
          f"{report['val_map_before']:.2f} → {report['val_map_after']:.2f}. Next: lacuna export {out}")


def _facts(found: Refitted, trained: Trained) -> dict:
    return {"from": trained.checkpoint, "refitted": int((found.steps > 0).sum()),
            "val_map_before": 100 * float(np.nanmean(found.before)),
            "val_map_after": 100 * float(np.nanmean(found.after))}


@dataclass(frozen=True)
class InputJob:
    """Parts with `inputs` float32 [n, D]: what enters the head, and `rows`, `bad`."""

    trained: Trained
    source: ShardSource
    cache: str = ""
    """Where what the backbone makes of the samples is kept, rounded as the head was trained on it; empty: nowhere."""

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(job="head inputs", cache=self.cache, **pass_facts(self.trained, self.source))

    def build(self) -> Callable[[int], Arrays]:
        worker = on_this_device(self.trained, self.source)
        if self.cache:
            worker.view = cached_view(self.trained, self.source, worker.model)

        def work(shard: int) -> Arrays:
            inputs, facts = worker.run(shard, head_inputs)
            return {"inputs": inputs, **facts}

        return work


def head_inputs(model: Classifier, inputs: torch.Tensor) -> torch.Tensor:
    """[B, D]: logits are the head's linear function of it."""
    pooled = model.pooled(model.features(inputs))
    return pooled if model.head_norm is None else model.head_norm(pooled, model.head_norm.factor(pooled))


def _samples(pool: Pool, settings: PoolSettings, trained: Trained, source: ShardSource) -> Samples:
    rows = shard_rows(source)
    view = cached_view(trained, source)
    what = f"{'features' if view is None else 'cached features'} of {source.index.url}"
    parts = pool.run(InputJob(trained, source, view.url if view else ""), rows, settings.folder(trained.run), what)
    inputs, labels, bad = [], [], []
    for shard, part in parts.read_all(list(rows)):
        if len(part["rows"]):
            inputs.append(part["inputs"])
            labels.append(source.sidecar.labels(shard).dense(source.classes)[part["rows"]])
        bad += bad_of(part)
    judge_bad(bad, sum(rows.values()), trained.config.data.max_bad_fraction, source.index.url)
    if not settings.parts:
        parts.remove(list(rows))
    return Samples(torch.from_numpy(np.concatenate(inputs)), np.concatenate(labels))
