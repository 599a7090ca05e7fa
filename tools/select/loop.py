"""The closed loop: ask, take the answers from a sidecar that knows them, train again with them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable

import numpy as np
import yaml

from lacuna.basics import storage
from lacuna.basics.deaths import describe_exit
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.launches import command, environment
from lacuna.tools.passes.trained import Trained, open_trained
from lacuna.tools.run_files import read_file
from lacuna.tools.select.questions import Entry, Questions
from lacuna.tools.suggest.evidence import Decided
from lacuna.tools.suggest.table import write_sidecar
from lacuna.trainer.run_folder import CONFIG

IMAGES = "images"  # --questions
Ask = Callable[[Trained, ShardSource, Decided, argparse.Namespace], Questions]


def run_rounds(args: argparse.Namespace, ask: Ask) -> list[dict]:
    """Facts of the run that it began with and of every round."""
    first = open_trained(args.model)
    if not storage.is_local(first.run):
        raise UserError(f"{first.run}: rounds train new runs beside the first one: copy it to a disk.")
    split = first.config.data.train
    base = ShardSource.load(split.url, args.labels or split.labels, split.subset, first.config.data.scratch)
    truth = Sidecar.load(base.index, args.answers)
    answered: dict[Entry, int] = {}
    facts = [{"round": 0, "run": first.run, "answered": 0, "yes": 0, **results(first.run)}]
    trained = first
    for number in range(1, args.rounds + 1):
        # The model of this round knows the answers so far; what is left to ask is judged by the labels it began with.
        decided = {entry: value == POSITIVE for entry, value in answered.items()}
        questions = ask(trained, base, decided, args)
        if not len(questions):
            break
        answered |= answers(questions, truth)
        kind = f"{args.by}-{IMAGES}" if args.questions == IMAGES else args.by
        name = f"{os.path.basename(first.run)}-{kind}-round{number}"
        write_sidecar(base.sidecar, name, answered, {"by": "lacuna select", "answers": args.answers}, overwrite=True)
        trained = open_trained(train(first, name, args.ranks))
        facts.append({"round": number, "run": trained.run, "answered": len(answered),
                      "yes": sum(value == POSITIVE for value in answered.values()), **results(trained.run)})
    return facts


def answers(questions: Questions, truth: Sidecar) -> dict[Entry, int]:
    """Entry → POSITIVE or NEGATIVE, for those that the sidecar knows."""
    found: dict[Entry, int] = {}
    for shard in sorted(set(questions.shards.tolist())):
        entries = [entry for entry in questions.entries() if entry[0] == shard]
        rows = sorted({row for _, row, _ in entries})
        dense = truth.labels(shard).dense(len(truth.index.classes), np.array(rows))
        found |= {entry: int(dense[rows.index(entry[1]), entry[2]]) for entry in entries}
    return {entry: value for entry, value in found.items() if value != UNKNOWN}


def train(first: Trained, name: str, ranks: int) -> str:
    """The folder of a new run beside the first, from its config, with the sidecar of the same name."""
    runs = os.path.dirname(storage.local_path(first.run))
    body = yaml.safe_load(read_file(first.run, CONFIG) or b"")
    config = os.path.join(runs, f"{name}.yaml")
    body |= {"name": name, "run_folder": runs}
    body["data"]["train"] = {**body["data"]["train"], "labels": name}
    storage.write_atomic(config, yaml.safe_dump(body, sort_keys=False).encode())
    done = subprocess.run(command(ranks, "--config", config), env=environment(), stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"the run {name} {describe_exit(done.returncode)}; see {os.path.join(runs, name)}/log.txt.")
    os.remove(config)
    return os.path.join(runs, name)


def results(run: str) -> dict[str, float | None]:
    body = json.loads(read_file(run, "results.json") or b"{}")
    return {f"{split}_map": body.get(split, {}).get("map") for split in ("val", "test")}
