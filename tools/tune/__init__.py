"""Search settings on validation images, or compare methods with the same budget for each.

  lacuna tune my.yaml                                       the section `tune:` of my.yaml, or a default search
  lacuna tune my.yaml --space space.yaml --trials 81        a space in a file of its own, so many trials
  lacuna tune my.yaml --hours 8 --workers 4                 overnight, four trainings at a time
  lacuna tune my.yaml --methods an role en --trials 27      27 trials of each; --methods all: of all that fit the data
  lacuna tune my.yaml --address auto --ranks 8              on a Ray cluster, 8 GPUs for each trial
The section (or the file), all of it optional:
  tune:
    space: {phases.0.lr: {log: [1e-4, 1e-1]}, phases.0.batch: [16, 64]}     also {range: [0, 1]}, {whole: [5, 20]}
    methods: {an: {}, role: {method.lr: {log: [1e-3, 1e-1]}}}                settings of one method alone
    trials: 27                                                               or hours: 8
    halving: 3        of all trials a third goes on for three times as long, and so on; 1: all go to their end
Trial 0 is the config as it stands. A trial is a run of `lacuna train` without the test set, which is never read; one
that fails or diverges is noted with its reason. The same command goes on after a kill, a larger budget goes on with a
finished search. The folder (--out, default RUN_FOLDER/NAME-tune) gets best.yaml for `lacuna train`, trials.csv,
search.json and log.txt; `lacuna report FOLDER` shows what mattered.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import Any

from lacuna.basics import storage
from lacuna.basics.clock import clock
from lacuna.basics.errors import UserError
from lacuna.basics.places import CONFIGS
from lacuna.tools.passes.parts import absolute
from lacuna.tools.trials.crew import add_crew_arguments, crew_settings, open_crew, work_through
from lacuna.tools.trials.ledger import Ledger
from lacuna.tools.trials.readiness import Readiness
from lacuna.tools.trials.watching import Watching
from lacuna.tools.tune import findings
from lacuna.tools.tune.budget import Tune, checked, contenders
from lacuna.tools.tune.search import SearchWork
from lacuna.trainer.config.files import changed, parse_overrides, read_body, read_yaml
from lacuna.trainer.config.sections import Config
from lacuna.trainer.config.tables import closest
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import METHODS

TAKES_OVERRIDES = True
_OWN_SPACES = os.path.join(CONFIGS, "tune", "methods.yaml")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, FILE:ROW of a table, or the name of what ships")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    parser.add_argument("--space", metavar="FILE", help="YAML file with what the section `tune:` would hold")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="compare these, or all; default: those below "
                        "`methods:` of the section, or the config's own")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--trials", type=int, metavar="N", help="of each method (default 27)")
    budget.add_argument("--hours", type=float, metavar="H", help="of the whole search, instead of a number of trials")
    parser.add_argument("--out", help="folder or URL (default: RUN_FOLDER/NAME-tune)")
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    add_crew_arguments(parser)


def run(args: argparse.Namespace) -> None:
    # What follows --methods may also be settings.
    named = [word for word in args.methods or [] if "=" not in word]
    body = read_body(args.config)
    tune, where = read_section(args, body)
    body = changed(body, parse_overrides([*args.overrides, *(w for w in args.methods or [] if "=" in w)]))
    config = checked(body, args.config)  # also the settings of its own method, which may take no part
    if config.data.val is None:
        raise UserError(f"{args.config}: data.val is not set; trials are judged by their validation mAP. Give fully "
                        "labelled images that take no part in training, e.g. data.val.url=….")
    blind = changed(body, [(["data", "test"], None, where)])  # nothing below can read the test set
    methods, left_out = chosen_methods(named or list(tune.methods) or [str(config.method.get("name"))], blind, where)
    tune = with_defaults(tune, config, bool(named))
    out = absolute(args.out or storage.join(config.run_folder, f"{config.name}-tune"))
    ledger, settings = Ledger(out), crew_settings(args)
    rivals = contenders(blind, tune, methods, where)
    with ledger.held():
        work = SearchWork(rivals, tune, out, ledger, settings.ranks)
        write = functools.partial(findings.write, work, args.config, left_out, config)
        with open_crew(settings) as crew, Watching(out, work.epochs_left, work.summary, crew.slots) as watching:
            for method, why in left_out.items():
                watching.say(f"{method} is left out: {why}")
            whole = work_through(work, ledger, crew, watching, write)
            watching.say(work.summary())
        found = write()
    print(json.dumps(found) if args.json else as_text(found, out, whole))
    if found["best"] is None and found["trials"]:
        raise UserError(f"no trial has a score; the first: {found['trials'][0]['reason'] or 'not finished'}")


def read_section(args: argparse.Namespace, body: dict) -> tuple[Tune, str]:
    """The section, from the config or a file, with the budget of the command line."""
    section, where = body.get("tune") or {}, f"{args.config}: tune"
    if args.space:
        found = read_yaml(args.space, f"--space {args.space}")
        section, where = found.get("tune", found), args.space
    if not isinstance(section, dict):
        raise UserError(f"{where}: expected keys and values, found {type(section).__name__}.")
    section = dict(section)
    for key, value in (("trials", args.trials), ("hours", args.hours)):
        if value is not None:
            if value <= 0:
                raise UserError(f"--{key} {value}: must be more than 0.")
            section.pop("hours" if key == "trials" else "trials", None)
            section[key] = value
    return validated(Tune, section, where), where


def with_defaults(tune: Tune, config: Config, compared: bool) -> Tune:
    """Without a space: the last phase's learning rate, a decade to either side. Then, and when methods are compared,
    those that the section does not name bring settings of their own (configs/tune/methods.yaml)."""
    space, nothing = tune.space, not tune.space and not tune.methods
    own: dict[str, dict[str, Any]] = read_yaml(_OWN_SPACES, _OWN_SPACES) if compared or nothing else {}
    if nothing:
        last = len(config.phases) - 1
        rate = config.phases[last].lr
        space = {f"phases.{last}.lr": {"log": [float(f"{rate / 10:.3g}"), float(f"{rate * 10:.3g}")]}}
    return tune.model_copy(update={"space": space, "methods": {**own, **tune.methods}})


def chosen_methods(names: list[str], body: dict, where: str) -> tuple[list[str], dict[str, str]]:
    """Methods to compare and, of `all`, those that cannot be trained here, with the reason."""
    everything = names == ["all"]
    for name in [] if everything else names:
        if name not in METHODS:
            raise UserError(f"method {name!r}: {closest(name, METHODS, 'there are')} `lacuna methods` lists them.")
    ready, fit, unfit = Readiness(), list[str](), dict[str, str]()
    for name in METHODS if everything else dict.fromkeys(names):
        try:
            config = checked(changed(body, [(["method", "name"], name, where)]), f"method {name!r}")
            why = ready.why_not(config)
        except UserError as error:
            if not everything:
                raise
            why = str(error)
        if why is None:
            fit.append(name)
        elif everything and not why.startswith(("dataset", "weights")):
            unfit[name] = why
        else:
            raise UserError(why if why.startswith("method") else f"method {name!r}: {why}")
    if not fit:
        raise UserError(f"{where}: no method fits; the first: {next(iter(unfit.values()))}")
    return fit, unfit


def as_text(found: dict[str, Any], out: str, whole: bool) -> str:
    by_name = {trial["trial"]: trial for trial in found["trials"]}
    lines = [f"{'method':<14}{'trials':>7}{'failed':>8}{'val mAP':>9}  best trial and its settings"]
    ranked = sorted(found["best_of_methods"].items(), key=lambda item: -(by_name[item[1]]["score"] or 0))
    for method, name in ranked:
        trials = [trial for trial in found["trials"] if trial["method"] == method]
        failed = sum(trial["status"] == "failed" for trial in trials)
        best = by_name[name]
        settings = ", ".join(f"{k} {v}" for k, v in best["settings"].items()) or "the config as it stands"
        lines.append(f"{method:<14}{len(trials):>7}{failed:>8}{best['score']:>9.2f}  {name}: {settings}")
    ending = "" if whole else " The time is up; a larger --hours goes on."
    lines.append(f"{len(found['trials'])} trials in {clock(found['seconds'])}.{ending}")
    if found["best"]:
        lines.append(f"Next: lacuna train {storage.join(out, 'best.yaml')}, or lacuna report {out}")
    return "\n".join(lines)
