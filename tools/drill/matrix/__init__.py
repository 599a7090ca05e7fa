"""The matrix under kills: {1, 2, 4 ranks, changing between launches} × ZeRO 0, 1, 2 × {local disk, a failing S3 server}
× five methods, struck at random moments and at every event that counts.

Rounds are numbered and written to FOLDER/rounds.jsonl; the same command goes on where it was ended. What failed is kept
in FOLDER/rounds, and its smallest form that still fails is printed.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from lacuna.basics.errors import UserError
from lacuna.tools.drill.matrix.cells import METHODS, STAGES, STORAGES, Cell, make_data, upload_data
from lacuna.tools.drill.matrix.ranks import import_everything, in_child
from lacuna.tools.drill.matrix.references import References
from lacuna.tools.drill.matrix.rounds import Blow, Play, Result, draw
from lacuna.tools.drill.matrix.s3 import Server

ROUNDS = "rounds.jsonl"


class Matrix:
    def __init__(self, root: str, seed: int, cells: list[Cell]):
        self.root, self.seed, self.cells = root, seed, cells
        self.references = References(root)
        self.server: Server | None = None
        self.path = os.path.join(root, ROUNDS)
        self.data = os.path.join(root, "data")
        if not os.path.isdir(self.data):
            in_child(lambda: make_data(self.data + ".partial"), os.path.join(root, "data.out"))
            os.rename(self.data + ".partial", self.data)

    def warm_up(self) -> None:
        """One run of each kind of data and storage, so that what they need is imported before ranks are forked."""
        for cell in (Cell("en_scl", "zero2", "local"), Cell("role", "zero1", "s3")):
            if cell.storage in {own.storage for own in self.cells} or cell.storage == "local":
                with tempfile.TemporaryDirectory() as folder:
                    remote = cell.storage == "s3"
                    body = cell.config("s3://bucket/data" if remote else self.data,
                                       "s3://bucket/warm" if remote else folder, "run", folder)
                    self._serve(cell)
                    import_everything(["--config", self.references.write_config(body, os.path.join(folder, "x.yaml"))],
                                      os.path.join(folder, "out"))

    def done(self) -> dict[int, dict]:
        if not os.path.exists(self.path):
            return {}
        with open(self.path, encoding="utf-8") as f:
            lines = [json.loads(line) for line in f if line.endswith("\n")]
        other = next((line for line in lines if line["seed"] != self.seed), None)
        if other:
            raise UserError(f"{self.path}: its rounds were drawn with --seed {other['seed']}, not {self.seed}. Give "
                            "that seed, or another --folder.")
        return {line["round"]: line for line in lines}

    def rounds(self, numbers: Sequence[int]) -> list[dict]:
        """Those of earlier calls included; a single one is played again."""
        done = self.done()
        left = [number for number in numbers if number not in done or len(numbers) == 1]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
        try:
            if left:
                self.warm_up()
            for number in left:
                line = done[number] = self.round(number)
                print(f"round {number}, {line['cell']}: {line['launches']} launches, {line['kills']} kills, "
                      f"{line['faults']} other faults, {line['seconds']:.0f} s: "
                      f"{'DIFFERENT' if line['differences'] else 'equal'}", file=sys.stderr, flush=True)
        finally:
            if self.server:
                self.server.stop()
        return [done[number] for number in sorted(done)]

    def round(self, number: int) -> dict:
        cell, blows = draw(self.seed, number, self.cells)
        result = self._play(cell, blows, f"round-{number}")
        line = {"round": number, "seed": self.seed, **result.line()}
        if result.differences:
            line["smallest"] = [asdict(blow) for blow in self._smallest(cell, blows, number)]
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        return line

    def _play(self, cell: Cell, blows: list[Blow], name: str) -> Result:
        self._serve(cell)
        return Play(self.root, cell, blows, name, self.references, self.server).play()

    def _serve(self, cell: Cell) -> None:
        if cell.storage == "s3" and self.server is None:
            self.server = Server()
            os.environ |= self.server.variables
            in_child(lambda: upload_data(self.data, "s3://bucket/data"), os.path.join(self.root, "upload.out"))

    def _smallest(self, cell: Cell, blows: list[Blow], number: int) -> list[Blow]:
        """Blows are left out one after another as long as the round still fails."""
        kept = blows
        for blow in blows:
            fewer = [other for other in kept if other is not blow]
            if fewer and self._play(cell, fewer, f"round-{number}-smaller").differences:
                kept = fewer
        return kept


def cells_of(methods: list[str], stages: list[str], storages: list[str]) -> list[Cell]:
    for flag, chosen, legal in (("--methods", methods, METHODS), ("--zero", stages, STAGES),
                                ("--storage", storages, STORAGES)):
        unknown = [name for name in chosen if name not in legal]
        if unknown:
            raise UserError(f"{flag} {unknown[0]}: there are {', '.join(legal)}.")
    return [Cell(*names) for names in itertools.product(methods, stages, storages)]


def summary(lines: list[dict]) -> dict:
    survived = [seconds for line in lines for seconds in line["survived"]]
    events = collections.Counter(re.sub(r"\d[\w-]*", "#", event) for line in lines for event in line["events"])
    failed = [line for line in lines if line["differences"]]
    return {
        "rounds": len(lines), "launches": sum(line["launches"] for line in lines),
        "kills": sum(line["kills"] for line in lines), "early_kills": sum(line["early"] for line in lines),
        "other_faults": sum(line["faults"] for line in lines), "mismatches": len(failed),
        "cells": len({line["cell"] for line in lines}), "kinds_of_events": len(events),
        "survived_seconds": {"median": statistics.median(survived), "worst": max(survived)} if survived else {},
        "hours": round(sum(line["seconds"] for line in lines) / 3600, 2),
        "failed": [{key: line[key] for key in ("round", "cell", "differences", "smallest")} for line in failed],
    }


def table(report: dict, folder: str, seed: int) -> str:
    lines = [f"{report['rounds']} rounds over {report['cells']} cells, {report['launches']} launches, "
             f"{report['hours']} h",
             f"SIGKILLs {report['kills']} (and {report['early_kills']} before anything was committed), at "
             f"{report['kinds_of_events']} kinds of events; other faults {report['other_faults']}",
             f"rounds that did not end as the run in peace: {report['mismatches']}"]
    if report["survived_seconds"]:
        lines.append("other ranks outlived a killed one by {median:.1f} s (median), {worst:.1f} s (worst)".format(
            **report["survived_seconds"]))
    for failed in report["failed"]:
        lines += [f"round {failed['round']}, {failed['cell']}: different in {', '.join(failed['differences'][:5])}",
                  f"  again: lacuna drill --matrix --folder {folder} --seed {seed} --round {failed['round']}",
                  f"  the fewest blows that did it: {json.dumps(failed['smallest'])}"]
    return "\n".join(lines)
