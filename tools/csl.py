"""Class-aware selective loss in one command, as published: train with unknown labels ignored, estimate the class prior
with that model over the training set (on Ray), train the selective loss with it.

  lacuna csl csl:openimages_v6_selective --ranks 8
  lacuna csl csl:coco14_fpc_selective name=coco data.workers=4 --ignore-set phases.0.epochs=10
The first training uses plain cross entropy whatever γ, α and clip the config has: a prior is a mean of probabilities,
and weighted losses do not give any. --ignore-set method.gamma_negative=3 and the like change that.
The runs are NAME-ignore and NAME; the prior is in NAME-ignore/prior.json. The same command goes on where it was
interrupted: a finished stage is not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from lacuna.basics import storage
from lacuna.basics.deaths import describe_exit
from lacuna.basics.errors import UserError
from lacuna.tools.launches import command, environment, gpus
from lacuna.tools.passes.datasets import training_set
from lacuna.tools.passes.parts import absolute
from lacuna.tools.passes.pool import PoolSettings, add_pool_arguments, pool_settings
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.prior import estimate, provenance, write
from lacuna.tools.run_files import run_config
from lacuna.trainer.config.files import load_config
from lacuna.trainer.config.sections import Config

# Of the training that the prior comes from: on COCO with FPC the authors' γ put 20 priors above η = 0.5 instead of one.
_PLAIN = {"mode": "ignore", "prior": "null", "soft_prior": 0, "gamma_positive": 0, "gamma_negative": 0,
          "gamma_unknown": 0, "alpha_positive": 1, "alpha_negative": 1, "clip": 0}
_SHOWN = ("map_csl_c", "map_csl_o", "map_skip_empty", "map")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="experiment whose method is csl: YAML file, FILE:ROW, or by name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it, for both trainings")
    parser.add_argument("--ranks", type=int, metavar="N", help="DeepSpeed ranks (default: one per GPU, else 1)")
    parser.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile: all slots of several nodes instead")
    parser.add_argument("--ignore-set", action="append", default=[], metavar="section.key=value",
                        help="further changes for the first training only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    overrides = [*args.overrides]
    final = load_config(args.config, overrides)
    if final.method.get("name") != "csl":
        raise UserError(f"{args.config}: method.name is {final.method.get('name')!r}; this command is for csl.")
    settings = pool_settings(args)
    first = [*overrides, f"name={final.name}-ignore", *(f"method.{key}={value}" for key, value in _PLAIN.items()),
             *args.ignore_set]
    ignore = _train(args, "training with unknown labels ignored", first)
    prior = _prior(ignore, settings)
    second = [*overrides, "method.mode=selective", f"method.prior={prior}"]
    selective = _train(args, "training with the selective loss", second)
    results = {"ignore": _results(ignore), "selective": _results(selective)}
    if args.json:
        print(json.dumps({"prior": prior, "ignore_run": ignore.folder, "selective_run": selective.folder, **results}))
    else:
        _show(results)


def _train(args: argparse.Namespace, title: str, overrides: list[str]) -> Config:
    """One training, unless its run folder says that it is finished with this very config."""
    config = load_config(args.config, overrides)
    if _finished(config):
        print(f"== {title}: {config.folder} is finished", file=sys.stderr, flush=True)
        return config
    print(f"== {title}: {config.folder}", file=sys.stderr, flush=True)
    words = command(args.ranks or gpus() or 1, "--config", args.config, *overrides, hostfile=args.hostfile)
    done = subprocess.run(words, env=environment(), stdout=2)  # to stderr: ours is for the results
    if done.returncode:
        raise UserError(f"{title} {describe_exit(done.returncode)}; see above and {config.folder}/log.txt. "
                        "The same command goes on from its last checkpoint.")
    if not _finished(config):  # asked to stop: exit code 0, but no results
        raise UserError(f"{title} was stopped before its end. The same command goes on from its last checkpoint.")
    return config


def _finished(config: Config) -> bool:
    if not storage.exists(storage.join(config.folder, "results.json")):
        return False
    before = run_config(config.folder)
    return not before.differences(config) and before.data.test == config.data.test


def _prior(config: Config, settings: PoolSettings) -> str:
    """The prior file of a finished Ignore run; an existing one is used if this model and dataset gave it."""
    trained = open_trained(config.folder)
    source = training_set(trained)
    out = storage.join(absolute(config.folder), "prior")
    made_of = provenance(trained, source)
    try:
        found = json.loads(storage.read_bytes(f"{out}.json"))
    except (FileNotFoundError, ValueError):
        found = {}
    if all(key in found and found[key] == value for key, value in made_of.items()):
        print(f"== class prior: {out}.json is finished", file=sys.stderr, flush=True)
    else:
        write(out, trained, source, estimate(trained, source, settings))
    return f"{out}.json"


def _results(config: Config) -> dict:
    return json.loads(storage.read_bytes(storage.join(config.folder, "results.json")))


def _show(results: dict[str, dict]) -> None:
    sets = [name for name in ("val", "test") if name in results["selective"]]
    names = {"map_csl_c": "mAP(C)", "map_csl_o": "mAP(O)", "map_skip_empty": "mAP", "map": "mAP, empty as 0"}
    print(f"{'stage':<12}" + "".join(f"{split + ' ' + names[key]:>22}" for split in sets for key in _SHOWN))
    for stage, found in results.items():
        print(f"{stage:<12}" + "".join(f"{found[split][key]:22.3f}" for split in sets for key in _SHOWN))
