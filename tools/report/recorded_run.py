"""What a run folder holds, as the page needs it: curves, results, AP of every class."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.index import Sidecar, sidecar_names
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.schema import is_store
from lacuna.state_store.store import StateStore
from lacuna.tools.passes.parts import absolute
from lacuna.tools.run_files import read_file, run_config, run_name, state_url
from lacuna.trainer.config.reported import as_text, reported_for_run
from lacuna.trainer.config.sections import Config
from lacuna.trainer.run_folder import METRICS
from lacuna.trainer.run_log import metric_lines
from lacuna.trainer.training_data import training_source

Lacks = Callable[[str, str], None]  # (what, why) → a line in the page's list of what is absent
_POINTS = 800  # of a curve: more cannot be told apart on a screen
_CUMULATIVE = ("state_stall_seconds", "state_bytes_read", "state_bytes_written")


@dataclass(frozen=True)
class RecordedRun:
    path: str  # or URL
    config: Config
    lines: list[dict]  # of metrics.jsonl

    @classmethod
    def open(cls, path: str) -> RecordedRun:
        path = absolute(path)
        return cls(path, run_config(path), metric_lines(read_file(path, METRICS) or b""))

    @property
    def name(self) -> str:
        return run_name(self.path)

    @cached_property
    def results(self) -> dict[str, Any]:
        return self._json("results.json")

    @cached_property
    def train(self) -> ShardSource | None:
        """The training set, if it is still where it was."""
        try:
            return training_source(self.config)
        except UserError:
            return None

    @cached_property
    def store(self) -> StateStore | None:
        """The per-sample state, if the method keeps any."""
        url = state_url(self.path, self.config)
        return state_store.open(url) if is_store(url) else None

    def scores(self) -> dict[str, float | None]:
        """mAP (classes without positives skipped) of the finished run, or of the best epoch so far."""
        found: dict[str, float | None] = {}
        for split in ("val", "test"):
            part = self.results.get(split)
            found[split] = as_number(part.get("map_skip_empty")) if isinstance(part, dict) else None
        if found["val"] is None:
            seen = [score for line in self.lines if (score := as_number(line.get("val_map_skip_empty"))) is not None]
            found["val"] = max(seen, default=None)
        return found

    def reported(self) -> dict[str, str] | None:
        """What a paper reports for the row of a table that this run is named like."""
        found = reported_for_run(self.config.name, self.config.method["name"])
        if found is None:
            return None
        return {"config": found.config, "numbers": as_text(found.numbers), "source": found.source}

    def facts(self, lacks: Lacks) -> dict[str, Any]:
        if not self.lines:
            lacks("curves", "metrics.jsonl is not there or empty: no step was reported yet.")
        if not self.results:
            lacks("test results", "results.json is not there: the run has not finished.")
        source = self.train
        if source is None:
            lacks("figures about the training set", f"{self.config.data.train.url} cannot be read any more.")
        elif not any("state_bytes_read" in line for line in self.lines):
            lacks("state-store I/O", f"the method {self.config.method['name']!r} keeps no per-sample state.")
        return {"name": self.name, "path": self.path, "method": self.config.method["name"],
                "phases": [phase.name for phase in self.config.phases], "scores": self.scores(),
                "reported": self.reported(), "samples": int(source.counts.sum()) if source else None,
                "steps": max((line["step"] for line in self.lines), default=0), "versions": self._json("versions.json"),
                "keep": self.config.train.keep, "epochs": sum(phase.epochs for phase in self.config.phases),
                "curves": curves(self.lines)}

    def class_rows(self, split: str) -> dict[str, dict[str, Any]]:
        """class name → AP on the test or validation set; empty if the run has not come so far."""
        table = read_file(self.path, f"{split}_classes.csv")
        if table is None:
            return {}
        try:
            return {row["name"]: {"id": row["id"], "positives": int(row["positives"]),
                                  "ap": float(row["ap"]) if row["ap"] else None}
                    for row in csv.DictReader(io.StringIO(table.decode(), newline=""))}
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise self._damaged(f"{split}_classes.csv", error) from None

    def annotated_fraction(self) -> dict[str, float]:
        """class name → annotated entries ÷ training samples, by the sidecar's counts."""
        source = self.train
        if source is None:
            return {}
        sidecar = source.sidecar
        if sidecar.unlisted == NEGATIVE:
            return dict.fromkeys(source.index.classes, 1.0)
        total = (sidecar.positives + sidecar.negatives) / max(1, source.index.samples)
        return dict(zip(source.index.classes, total.tolist(), strict=True))

    def _json(self, name: str) -> dict[str, Any]:
        try:
            body = parse_json(read_file(self.path, name) or b"{}")
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise self._damaged(name, error) from None
        return body

    def _damaged(self, name: str, error: Exception) -> UserError:
        return UserError(f"{storage.join(self.path, name)}: damaged ({type(error).__name__}: {error}). Remove it: the "
                         "page then says that it is absent, and the next launch of the run writes it anew.")


def as_number(value: object) -> float | None:
    """What a run recorded as a number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def full_labels(source: ShardSource, name: str) -> Sidecar | None:
    """The sidecar if it is there and knows every entry."""
    if name not in sidecar_names(source.index):
        return None
    sidecar = Sidecar.load(source.index, name)
    return sidecar if sidecar.unlisted == NEGATIVE else None


def curves(lines: list[dict]) -> dict[str, list[list[float | None]]]:
    """name → [step, value] points; counters that only grow become what happened between two reports, per step."""
    found: dict[str, list[list[float | None]]] = {}
    before: dict[str, float] = {}
    last_step = 0
    for line in lines:
        if line.get("kind") not in ("train", "epoch"):
            continue
        step = line["step"]
        for key, recorded in line.items():
            value = as_number(recorded)
            if key in ("kind", "step", "phase", "epoch", "bad", "launch") or value is None:
                continue
            if key in _CUMULATIVE:
                # A resumed launch counts from 0 again.
                grown = value - before.get(key, 0) if value >= before.get(key, 0) else value
                before[key] = value
                value = grown / max(1, step - last_step)
            elif key == "data_wait_seconds":
                value = value / max(1, step - last_step)
            name = f"epoch_{key}" if line["kind"] == "epoch" and not key.startswith("val_") else key
            found.setdefault(name, []).append([step, value if math.isfinite(value) else None])
        if line["kind"] == "train":
            last_step = step
    return {name: _thinned(points) for name, points in found.items()}


def _thinned(points: list) -> list:
    """Every k-th point and the last: a curve of a million steps must not make a page of a hundred megabytes."""
    stride = -(-len(points) // _POINTS)
    return points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])
