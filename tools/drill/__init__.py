"""Rehearses failures before a long run: trains handwritten-digit scenes with per-sample state on this machine and its
storage while ranks are killed or frozen, the disk fills, a state chunk is corrupted or a checkpoint file is deleted,
and compares with a run that was left in peace. Every relaunch has to resume to the same weights and state, bit for bit.

  lacuna drill                                      each fault once (about 90 s)
  lacuna drill --rounds 50 --folder /shared/drill   on the storage that the real run will use
  lacuna drill --faults kill freeze --ranks 4 --json
  lacuna drill --matrix --rounds 50 --folder kept   many short runs under kills: five methods, ZeRO 0 to 2, changing
                                                    ranks, local disk and a failing S3 server; the same command goes on
The exit code is 1 if anything was lost, repeated or different.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass

import numpy as np
import yaml

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.readers import digits
from lacuna.tools.drill.faults import FAULTS
from lacuna.tools.launches import Launch, LaunchError, command, environment, read_lines, read_trace

_BATCH, _STREAMS, _OPEN, _EPOCHS = 32, 4, 2, 7
_KEPT = ("model.safetensors", "method.safetensors")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="faults in all (default: each chosen fault once)")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), metavar="FAULT",
                        help=f"of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="1, 2 or 4 (default 2)")
    parser.add_argument("--timeout", type=float, default=20, help="train.timeout_seconds of the drill (default 20)")
    parser.add_argument("--folder", help="empty or new folder, on the storage to try (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (default 0)")
    parser.add_argument("--matrix", action="store_true", help="many short runs, each killed often; needs --folder")
    parser.add_argument("--methods", nargs="+", help="of the matrix (default: role en_cl en_scl em_apl csl)")
    parser.add_argument("--zero", nargs="+", help="of the matrix: zero0 zero1 zero2 (default: all)")
    parser.add_argument("--storage", nargs="+", help="of the matrix: local s3 (default: both)")
    parser.add_argument("--round", type=int, help="play only this round of the matrix, to see a failure again")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    if args.matrix:
        return _matrix(args)
    for flag in ("methods", "zero", "storage", "round"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag} is for the matrix only: add --matrix.")
    unknown = sorted(set(args.faults) - set(FAULTS))
    if unknown:
        raise UserError(f"--faults {unknown[0]}: there are {', '.join(FAULTS)}.")
    if args.ranks not in (1, 2, 4):
        raise UserError(f"--ranks {args.ranks}: the drill's {_STREAMS} streams can be shared by 1, 2 or 4.")
    if args.folder and os.path.isdir(args.folder) and os.listdir(args.folder):
        raise UserError(f"--folder {args.folder}: not empty. Give a new one; the drill leaves its files there.")
    root = args.folder or tempfile.mkdtemp(prefix="lacuna-drill-")
    try:
        outcomes = Drill(os.path.abspath(root), args.ranks, args.seed, args.timeout).rounds(
            args.faults, args.rounds or len(args.faults))
    finally:
        if not args.folder:
            shutil.rmtree(root, ignore_errors=True)
    table = summary(outcomes)
    good = all(line["lost_samples"] == line["duplicated_updates"] == 0 and line["state_equal"] for line in table)
    if args.json:
        print(json.dumps({"rounds": len(outcomes), "passed": good, "faults": table}))
    else:
        print(f"{'fault':<12} {'rounds':>6} {'detected after':>15} {'lost samples':>13} {'duplicated updates':>19} "
              "state equal")
        for line in table:
            equal = "yes" if line["state_equal"] else "NO"
            print(f"{line['fault']:<12} {line['rounds']:>6} {line['detected_after_seconds']:>13.1f} s "
                  f"{line['lost_samples']:>13} {line['duplicated_updates']:>19} {equal}")
    return 0 if good else 1


def _matrix(args: argparse.Namespace) -> int:
    from lacuna.tools.drill import matrix  # torch and what ranks need: seconds

    if not args.folder:
        raise UserError("--matrix keeps its rounds in a folder, to go on with them later: give --folder.")
    os.makedirs(args.folder, exist_ok=True)
    cells = matrix.cells_of(args.methods or list(matrix.METHODS), args.zero or list(matrix.STAGES),
                            args.storage or list(matrix.STORAGES))
    drill = matrix.Matrix(os.path.abspath(args.folder), args.seed, cells)
    lines = drill.rounds(range(args.rounds or 20) if args.round is None else [args.round])
    report = matrix.summary(lines)
    print(json.dumps(report) if args.json else matrix.table(report, args.folder, args.seed))
    return 1 if report["mismatches"] else 0


@dataclass
class Outcome:
    """What one fault did to the run."""

    fault: str
    detected_after: float
    resumed: int  # step that the next launch went on from
    equal: bool  # weights, method state and every field of the state at that step are the reference's
    lost: int = 0  # samples that the reference's steps had and the run's, up to the next fault, had not
    duplicated: int = 0  # samples that they had more often than the reference's


def summary(outcomes: list[Outcome]) -> list[dict]:
    """One line a fault; the worst detection of its rounds."""
    table = []
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.fault == fault]
        table.append({
            "fault": fault, "rounds": len(mine), "lost_samples": sum(o.lost for o in mine),
            "detected_after_seconds": round(max(o.detected_after for o in mine), 2),
            "detected_after_median": round(statistics.median(o.detected_after for o in mine), 2),
            "duplicated_updates": sum(o.duplicated for o in mine), "state_equal": all(o.equal for o in mine)})
    return table


class Bench:
    """One drilled run: what a fault needs to know of it."""

    def __init__(self, drill: Drill, name: str):
        self.drill, self.name, self.random = drill, name, drill.random
        self.folder = os.path.join(drill.root, name)
        self.launches: list[Launch] = []

    def start(self, *overrides: str) -> Launch:
        output = os.path.join(self.drill.root, f"{self.name}-{len(self.launches) + 1}.out")
        words = command(self.drill.ranks, "--config", self.drill.config, f"name={self.name}", *overrides)
        self.launches.append(Launch(words, output, environment(), self.drill.root))
        return self.launches[-1]

    def end(self) -> None:
        """Whatever happened, no process stays behind."""
        for launch in self.launches:
            if launch.process.poll() is None:
                launch.signal_all(signal.SIGKILL)
                launch.wait()

    def checkpoints(self) -> list[str]:
        root = os.path.join(self.folder, "checkpoints")
        names = sorted(name for name in os.listdir(root) if name.startswith("step-"))
        return [name for name in names if os.path.exists(os.path.join(root, name, "COMMIT.json"))
                and not os.path.exists(os.path.join(root, name, "DAMAGED.json"))]

    def largest_file(self) -> int:
        root = os.path.join(self.folder, "checkpoints", self.checkpoints()[-1])
        return max(os.path.getsize(os.path.join(base, name)) for base, _, names in os.walk(root) for name in names)

    def reached(self) -> int:
        return max((line["step"] for line in read_lines(os.path.join(self.folder, "metrics.jsonl"))), default=0)

    def shards_to_come(self, checkpoint: str) -> set[int]:
        """Shards that will be read after this checkpoint, in its epoch or the next."""
        step, epoch = int(checkpoint.removeprefix("step-")), 0
        while epoch + 1 < _EPOCHS and step >= self.drill.plan(epoch).steps:
            step, epoch = step - self.drill.plan(epoch).steps, epoch + 1
        return {int(shard) for shards, _ in self.drill.plan(epoch).batches(range(_STREAMS), step) for shard in shards}


class Drill:
    def __init__(self, root: str, ranks: int, seed: int, timeout: float):
        self.root, self.ranks, self.timeout = root, ranks, timeout
        self.random = random.Random(seed)
        self.config = os.path.join(root, "drill.yaml")
        self._make_data()

    def _make_data(self) -> None:
        data = os.path.join(self.root, "data")
        pack(digits.read(410, "train"), data, Layout(streams=1, rows_per_shard=32), workers=1)
        self.index = ShardIndex.load(data)
        annotate(LabelledRows(self.index, Sidecar.load(self.index, "labels")), "single", "single_positive",
                 SCHEMES["single_positive"]())
        body = {
            "name": "reference", "run_folder": self.root,
            "data": {"train": {"url": data, "labels": "single"}, "image_size": 32, "normalize": "centered",
                     "streams": _STREAMS, "open_shards": _OPEN, "augment": {"crop": "random_resized"}},
            "model": {"backbone": "lacuna:tiny", "expected_positives": 2.2},
            "method": {"name": "en_scl"},
            "phases": [{"name": "drill", "epochs": _EPOCHS, "batch": _BATCH, "lr": 1e-3}],
            "train": {"log_every": 1, "checkpoint_every": "3st", "keep": 5, "trace_samples": True,
                      "timeout_seconds": self.timeout},
        }
        with open(self.config, "w", encoding="utf-8") as f:
            yaml.safe_dump(body, f)

    def plan(self, epoch: int) -> EpochPlan:
        return EpochPlan(self.index.counts, mix(0, 0), epoch, _STREAMS, _BATCH, _OPEN)

    def rounds(self, faults: list[str], count: int) -> list[Outcome]:
        """Every fault in turn, in a random order, in runs of a few rounds each; each run is trained to its end."""
        outcomes: list[Outcome] = []
        with Progress(count + 1, "drill", "rounds") as meter:
            self.reference = Bench(self, "reference")
            try:
                if self.reference.start("train.keep=1000").wait() != 0:
                    raise UserError(f"the undisturbed run failed:\n{self.reference.launches[0].text()[-2000:]}")
            finally:
                self.reference.end()
            self.trace = read_trace(self.reference.folder)
            meter.advance()
            while len(outcomes) < count:
                chosen = self.random.sample(faults, len(faults))[: count - len(outcomes)]
                outcomes += self._disturbed(f"drill-{len(outcomes)}", chosen, meter)
        return outcomes

    def _disturbed(self, name: str, faults: list[str], meter: Progress) -> list[Outcome]:
        """One run with some faults one after another."""
        bench = Bench(self, name)
        launch, outcomes, at = bench.start(), [], 6
        room = (max(self.trace) - 12) // len(faults)
        try:
            for fault in faults:
                moment = at + self.random.randint(1, max(1, room - 6))
                launch.wait_until(lambda moment=moment: bench.reached() >= moment, f"step {moment}")  # type: ignore[misc]
                seconds, launch = FAULTS[fault](bench, launch)
                outcomes.append(self._judge(bench, launch, fault, seconds))
                at = max(at, outcomes[-1].resumed) + 6
                meter.advance()
            if launch.wait() != 0:
                raise LaunchError("the last launch failed", launch)
        finally:
            bench.end()
        self._count_samples(bench, outcomes)
        outcomes[-1].equal &= self._equal(bench, bench.checkpoints()[-1])
        return outcomes

    def _judge(self, bench: Bench, launch: Launch, fault: str, seconds: float) -> Outcome:
        """Where the next launch goes on, and whether everything there is as in the reference."""
        found: list[str] = []

        def resumes() -> bool:
            found[:] = re.findall(r"resuming from \S*(step-\d+)", launch.text())
            return bool(found)

        launch.wait_until(resumes, f"it resumed after {fault}")
        return Outcome(fault, seconds, int(found[0].removeprefix("step-")), self._equal(bench, found[0]))

    def _equal(self, bench: Bench, checkpoint: str) -> bool:
        facts = []
        for folder in (bench.folder, self.reference.folder):
            with open(os.path.join(folder, "checkpoints", checkpoint, "COMMIT.json"), encoding="utf-8") as f:
                files = json.load(f)["files"]
            facts.append([files.get(name, {}).get("sha256") for name in _KEPT])
        return facts[0] == facts[1] and _same_state(bench.folder, self.reference.folder, checkpoint)

    def _count_samples(self, bench: Bench, outcomes: list[Outcome]) -> None:
        """Every step's samples against the reference's; a difference belongs to the last fault before the step."""
        trace = read_trace(bench.folder)
        for step in sorted(self.trace.keys() | trace.keys()):
            expected, found = Counter(self.trace.get(step, [])), Counter(trace.get(step, []))
            owner = next((o for o in reversed(outcomes) if o.resumed < step), outcomes[0])
            owner.lost += (expected - found).total()
            owner.duplicated += (found - expected).total()


def _same_state(one: str, two: str, snapshot: str) -> bool:
    """Whether both have written the same shards by then, with the same content; the others have their first values."""
    readers = [state_store.open(os.path.join(folder, "state")).reader(snapshot) for folder in (one, two)]
    written = [{(field, shard) for field, shards in reader.refs.items() for shard in shards} for reader in readers]
    return written[0] == written[1] and all(
        np.array_equal(readers[0].read_shard(field, shard), readers[1].read_shard(field, shard))
        for field, shard in written[0])
