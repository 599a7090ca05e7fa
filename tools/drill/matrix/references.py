"""Runs that were left in peace, made when they are first needed and kept as hashes in the drill's folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace

import yaml

from lacuna.basics import storage
from lacuna.tools.drill.matrix.cells import STEPS, Cell
from lacuna.tools.drill.matrix.outcome import lineage, outcome
from lacuna.tools.drill.matrix.ranks import ChildFailed, Ranks, in_child

Stretches = list[tuple[int, int]]  # (last step, ranks)


class References:
    def __init__(self, root: str):
        self.root, self.folder = root, os.path.join(root, "references")
        os.makedirs(self.folder, exist_ok=True)

    @staticmethod
    def write_config(body: dict, path: str) -> str:
        with open(path, "w", encoding="utf-8") as f:
            yaml.safe_dump(body, f)
        return path

    def usual(self, cell: Cell, ranks: int) -> dict:
        """`events` of every rank and `seconds` of a launch in peace, on this cell's storage."""
        if cell.storage == "local":
            return self._reference(cell, [(STEPS, ranks)])
        path = os.path.join(self.folder, f"{cell}-{ranks}.json")
        if not os.path.exists(path):
            name = f"{cell}-{ranks}-{time.time_ns()}"
            storage.write_atomic(path, json.dumps(self._make(cell, name, [(STEPS, ranks)])).encode())
        with open(path, encoding="utf-8") as f:
            return json.load(f)

    def compare(self, cell: Cell, url: str, output: str) -> list[str]:
        """What differs between a finished run and one in peace with the same ranks at the same steps."""
        found, ranks = in_child(lambda: (outcome(url), lineage(url)), output)
        if len(ranks) != STEPS:
            return [f"the samples of {len(ranks)} steps were recorded, not of {STEPS}"]
        stretches = [(step, count) for step, count in enumerate(ranks, 1) if step == STEPS or ranks[step] != count]
        expected = self._reference(cell, stretches)["outcome"]
        return sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))

    def _reference(self, cell: Cell, stretches: Stretches) -> dict:
        """The storage makes no difference to what is learnt, so it is always on local disk."""
        cell = replace(cell, storage="local")
        name = "-".join([cell.method, cell.stage, *(f"{ranks}x{step}" for step, ranks in stretches)])
        path = os.path.join(self.folder, f"{name}.json")
        if not os.path.exists(path):
            storage.write_atomic(path, json.dumps(self._make(cell, name, stretches)).encode())
        with open(path, encoding="utf-8") as f:
            return json.load(f)

    def _make(self, cell: Cell, name: str, stretches: Stretches) -> dict:
        folder = os.path.join(self.folder, name)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        data, runs = os.path.join(self.root, "data"), folder
        if cell.storage == "s3":
            data, runs = "s3://bucket/data", f"s3://bucket/{name}"
        body = cell.config(data, runs, "run", os.path.join(folder, "staging"))
        config = self.write_config(body, os.path.join(folder, "run.yaml"))
        for number, (step, ranks) in enumerate(stretches):
            launch = Ranks(["--config", config], ranks, os.path.join(folder, f"{number}.out"),
                           stop_after=None if step == STEPS else step)
            if not launch.wait() or not launch.finished:
                raise ChildFailed(f"the run in peace {name} failed:\n{launch.text()[-3000:]}")
        found = in_child(lambda: outcome(storage.join(runs, "run")), os.path.join(folder, "outcome.out"))
        shutil.rmtree(folder, ignore_errors=True)
        return {"outcome": found, "events": [launch.events.count(rank) for rank in range(ranks)],
                "seconds": round(max(launch.ended), 2)}
