"""Says what a run will need before it is started: steps, disk, memory, I/O and time, and what will not fit.

  lacuna plan verelst_imagenet:imagenet_en_scl --ranks 8
  lacuna plan CONFIG method.top_k=10 train.state_budget_mb=4096 --json
  lacuna plan CONFIG --seconds 0        from the config alone: no calibration, state sizes before compression
The calibration trains for a short while on a few shards, on one rank with its share of the batch, and then some steps
of every phase if there are several. Exit code 1: something does not fit; every such line names the option to change.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from dataclasses import dataclass

import torch

from lacuna.basics.clock import clock
from lacuna.basics.errors import UserError
from lacuna.basics.free_disk import free_disk
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.schema import Schema
from lacuna.state_store.slots import Slots
from lacuna.tools.plan.caches import PlannedCache, planned_caches
from lacuna.tools.plan.calibration import Calibration, calibrate
from lacuna.trainer.assemble import load_sources, place_model, task_of
from lacuna.trainer.config.durations import to_steps
from lacuna.trainer.config.files import load_config
from lacuna.trainer.config.sections import Config
from lacuna.trainer.methods import build_method
from lacuna.trainer.world import World

TAKES_OVERRIDES = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file of the experiment, FILE:ROW of a table, or by name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    parser.add_argument("--ranks", type=int, default=1, help="of the run (default 1)")
    parser.add_argument("--ranks-per-node", type=int, help="that share a node's memory (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="of calibration, and as many again for further "
                        "phases (default 60; 0: none)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides)
    estimate = make_estimate(config, args.ranks, args.ranks_per_node or args.ranks, args.seconds)
    print(json.dumps(estimate) if args.json else as_text(estimate))
    return 1 if estimate["problems"] else 0


@dataclass(frozen=True)
class Shape:
    """What follows from the config and the index alone."""

    config: Config
    source: ShardSource
    ranks: int
    epochs: list[EpochPlan]  # the first epoch of every phase
    schema: Schema | None  # of the method's fields
    val_samples: int
    caches: list[PlannedCache]

    @classmethod
    def of(cls, config: Config, ranks: int) -> Shape:
        sources = load_sources(config)
        train = sources["train"]
        epochs = [EpochPlan(train.counts, mix(config.seed, number), 0, config.data.streams, phase.batch,
                            config.data.open_shards) for number, phase in enumerate(config.phases)]
        model = place_model(config, train, World(torch.device("cpu")))
        method = build_method(config.method, task_of(config, sources, model))
        fields = method.fields()
        schema = Schema.of(train.index.counts, "", fields, config.seed) if fields else None
        epochs[0].rank_streams(0, ranks)  # refuses a number of ranks that does not fit
        return cls(config, train, ranks, epochs, schema, int(sources["val"].counts.sum()) if "val" in sources else 0,
                   planned_caches(config, sources, model, method.needs()))

    @property
    def budget(self) -> int:
        return int(self.config.train.state_budget_mb * 2**20)

    @property
    def slots(self) -> int:
        """Shards whose state a rank holds at a time: as many as the budget allows and the epoch has for it."""
        if self.schema is None:
            return 0
        mine = math.ceil(len(self.source.index.shards) / self.ranks)
        return min(mine, Slots.count_within(self.schema, self.budget))

    @property
    def slots_needed(self) -> int:
        streams = self.epochs[0].rank_streams(0, self.ranks)
        return max(plan.outlook(streams).at_once for plan in self.epochs) if self.schema else 0

    @property
    def checkpoints_per_epoch(self) -> float:
        steps = self.epochs[0].steps
        every = to_steps(self.config.train.checkpoint_every, steps, steps * self.config.phases[0].epochs)
        return max(1.0, steps / every)

    @property
    def versions(self) -> float:
        """Copies of the whole state at the worst moment: the live one, what kept checkpoints still name, the best."""
        kept = self.config.train.keep / self.checkpoints_per_epoch
        return 1 + kept + (1 if self.val_samples else 0)


def make_estimate(config: Config, ranks: int, per_node: int, seconds: float) -> dict:
    shape = Shape.of(config, ranks)
    measured = None
    problems = _budget_problems(shape)
    for cache in shape.caches:
        problems += cache.problems(shape.epochs[cache.phase], ranks)
    if seconds > 0 and not problems:
        with tempfile.TemporaryDirectory(prefix="lacuna-plan-") as folder:
            measured = calibrate(config, shape.source, ranks, seconds, folder)
    fields = _fields(shape, measured)
    state = sum(field["bytes"] for field in fields)
    estimate = {
        "samples": int(shape.source.counts.sum()), "shards": len(shape.source.index.shards),
        "classes": shape.source.classes, "ranks": ranks, "calibrated": measured is not None,
        "phases": [{"name": phase.name, "epochs": phase.epochs, "steps_per_epoch": epoch.steps,
                    "steps": epoch.steps * phase.epochs} for phase, epoch in
                   zip(config.phases, shape.epochs, strict=True)],
        "fields": fields,
        "caches": [cache.facts() for cache in shape.caches],
        "disk": _disk(shape, state, measured),
        "ram_per_rank": _ram(shape, measured),
        "io_per_epoch": _io(shape, state, measured),
        "seconds": _seconds(shape, measured),
    }
    return {**estimate, "problems": problems + _space_problems(shape, estimate, per_node)}


def _fields(shape: Shape, measured: Calibration | None) -> list[dict]:
    """Disk of one version of every field; moments are fields of their own."""
    found = []
    samples = int(shape.source.index.counts.sum())  # rows that a subset leaves out have their place too
    for field in shape.schema.fields.values() if shape.schema else ():
        each = measured.stored.get(field.name, field.row_bytes) if measured else field.row_bytes
        found.append({"name": field.name, "dtype": field.dtype, "shape": list(field.shape),
                      "bytes_per_sample": field.row_bytes, "raw_bytes": field.row_bytes * samples,
                      "bytes": round(each * samples)})
    return found


def _disk(shape: Shape, state: int, measured: Calibration | None) -> dict:
    one = measured.checkpoint_bytes if measured else 0
    # A new one is written before an old one goes; the best is kept besides.
    copies = shape.config.train.keep + 1 + (1 if shape.val_samples else 0)
    return {"state": state, "state_peak": round(state * shape.versions), "checkpoint": one,
            "checkpoints_peak": one * copies}


def _ram(shape: Shape, measured: Calibration | None) -> dict | None:
    """The measured process, with the state slots and evaluation scores of the real run."""
    if measured is None:
        return None
    each = Slots.bytes_each(shape.schema) if shape.schema else 0
    used = min(measured.slots, shape.slots)
    state = shape.slots * each
    scores = math.ceil(shape.val_samples / shape.ranks) * shape.source.classes * 5
    return {"process": measured.peak_bytes - used * each, "state": state, "evaluation": scores,
            "total": measured.peak_bytes + (shape.slots - used) * each + scores}


def _io(shape: Shape, state: int, measured: Calibration | None) -> dict:
    """All ranks together, in an epoch after the first (the first reads no state)."""
    data = sum(shard.bytes for shard, rows in zip(shape.source.index.shards, shape.source.counts, strict=True) if rows)
    saved = round((measured.checkpoint_bytes if measured else 0) * shape.checkpoints_per_epoch)
    return {"data_read": data, "state_read": state, "state_written": state, "checkpoints_written": saved}


def _seconds(shape: Shape, measured: Calibration | None) -> dict | None:
    if measured is None:
        return None
    # Evaluation and waiting for peers come on top.
    per_epoch = [epoch.steps * each for epoch, each in zip(shape.epochs, measured.step_seconds, strict=True)]
    total = sum(each * phase.epochs for each, phase in zip(per_epoch, shape.config.phases, strict=True))
    return {"step": measured.step_seconds, "epoch": per_epoch, "run": total}


def _budget_problems(shape: Shape) -> list[str]:
    if shape.schema is None:
        return []
    try:
        slots = Slots.count_within(shape.schema, shape.budget)
    except UserError as error:
        return [f"train.state_budget_mb = {shape.config.train.state_budget_mb:g}: {error}"]
    if slots >= shape.slots_needed:
        return []
    needed = shape.slots_needed * Slots.bytes_each(shape.schema) / 2**20
    return [f"train.state_budget_mb = {shape.config.train.state_budget_mb:g} holds {slots} shards, a rank leases "
            f"{shape.slots_needed} at a time: raise it to {math.ceil(needed)}, lower data.open_shards, use more ranks "
            "or make smaller shards."]


def _space_problems(shape: Shape, estimate: dict, per_node: int) -> list[str]:
    found = []
    config, disk = shape.config, estimate["disk"]
    state_url = config.train.state_url or os.path.join(config.folder, "state")
    for what, needed, url, advice in (
            ("state", disk["state_peak"], state_url,
             "lower train.keep, store less (method.top_k or a smaller stored type where the method has them), or set "
             "train.state_url to other storage"),
            ("checkpoints", disk["checkpoints_peak"], config.folder, "lower train.keep or set run_folder")):
        free = free_disk(url)
        if free is not None and needed > free:
            found.append(f"{what}: {_size(needed)} at the worst moment, {url} has {_size(free)} free: {advice}.")
    ram, there = estimate["ram_per_rank"], _available_ram()
    if ram and ram["total"] * per_node > there:
        found.append(f"memory: {per_node} ranks of {_size(ram['total'])} on a node that has {_size(there)} available: "
                     "lower train.state_budget_mb (to what a rank leases at a time), set train.micro_batch, or put "
                     "fewer ranks on a node.")
    return found


def _available_ram() -> int:
    with open("/proc/meminfo", encoding="ascii") as f:
        line = next(line for line in f if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def as_text(estimate: dict) -> str:
    io, disk, ram, seconds = estimate["io_per_epoch"], estimate["disk"], estimate["ram_per_rank"], estimate["seconds"]
    lines = [f"{estimate['samples']:,} samples of {estimate['classes']:,} classes in {estimate['shards']:,} shards, "
             f"{estimate['ranks']} ranks"]
    lines += [f"phase {p['name']}: {p['epochs']} epochs of {p['steps_per_epoch']:,} steps = {p['steps']:,} steps"
              for p in estimate["phases"]]
    kind = "compressed" if estimate["calibrated"] else "before compression"
    for field in estimate["fields"]:
        shape = " × ".join(map(str, field["shape"]))
        lines.append(f"state field {field['name']}: {field['dtype']} [{shape}], {field['bytes_per_sample']:,} bytes a "
                     f"sample, {_size(field['bytes'])} {kind}")
    lines += [f"cache of phase {c['phase']}: {c['cut']} [{' × '.join(map(str, c['shape']))}] at half precision, "
              f"{c['views']} views (training, validation, test), {c['bytes_per_sample']:,} bytes a sample and view, "
              f"{_size(c['bytes'])}, of which {_size(c['bytes_there'])} are there" for c in estimate["caches"]]
    lines.append(f"disk: state {_size(disk['state'])} ({_size(disk['state_peak'])} at the worst moment), checkpoints "
                 f"{_size(disk['checkpoints_peak'])}")
    if ram:
        lines.append(f"memory per rank: {_size(ram['total'])} (process {_size(ram['process'])}, state "
                     f"{_size(ram['state'])}, evaluation {_size(ram['evaluation'])})")
    lines.append(f"I/O per epoch: data {_size(io['data_read'])}, state {_size(io['state_read'])} read and "
                 f"{_size(io['state_written'])} written, checkpoints {_size(io['checkpoints_written'])}")
    if seconds:
        each = zip(estimate["phases"], seconds["step"], seconds["epoch"], strict=True)
        lines += [f"time of phase {phase['name']}: {step:.3f} s a step, {clock(epoch)} an epoch"
                  for phase, step, epoch in each]
        most = "at most " if estimate["caches"] else ""
        lines.append(f"time: {most}{clock(seconds['run'])} in all, evaluation not counted")
        if estimate["caches"]:
            lines.append("time: epochs that find the cache full take a small part of the seconds given here, which "
                         "are those of filling it")
    lines += [f"DOES NOT FIT: {problem}" for problem in estimate["problems"]] or ["everything fits"]
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
