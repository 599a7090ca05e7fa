"""The numbers as a table for people, one JSON object for programs, and one CSV line a class."""

from __future__ import annotations

import math

import numpy as np

from lacuna.tools.eval.measure import GROUPS, Outcome
from lacuna.trainer.metrics.measures import write_table

_NAMES = {
    "top1": "top-1 (original labels)", "top5": "top-5 (original labels)", "real_top1": "ReaL top-1",
    "real_top5": "ReaL top-5", "map_c": "mAP(C), mean over classes", "map_o": "mAP(O), weighted by positives",
    "map_ll": "mAP, annotated classes without positives as 0", "map": "mAP, empty classes as 0",
    "map_skip_empty": "mAP, empty classes left out", "mf1": "mF1, given thresholds, empty classes as 0",
    "mf1_skip_empty": "mF1, given thresholds", "best_mf1": "best mF1 (thresholds chosen on this very set), empty as 0",
    "ece": "calibration error (ECE) of the scores as they are", "ece_calibrated": "ECE, calibrated on --val",
    "best_mf1_skip_empty": "best mF1 (thresholds chosen on this very set)",
}


def table(numbers: dict) -> str:
    """Name, percent, number of classes or rows."""
    lines = []
    for key, value in numbers.items():
        if key == "rows" or key.startswith("rows_") or key.endswith(("_rows", "_classes")):
            continue
        if value is None:
            lines.append(f"{_title(key):<58} {'not known':>9}")
            continue
        classes = numbers.get(f"{key}_classes")
        note = f"{classes:>6,} classes" if classes is not None else ""
        lines.append(f"{_title(key):<58} {value:9.3f} {note}")
    counted = [f"{numbers['rows']:,} rows"]
    if "real_rows" in numbers:
        counted.append(f"{numbers['real_rows']:,} with ReaL labels")
    return "\n".join([*lines, ", ".join(counted)])


def _title(key: str) -> str:
    if key in _NAMES:
        return _NAMES[key]
    if key.startswith("map_group"):
        return f"mAP(C) of group {key[9:]} of {GROUPS} (1: rarest classes)"
    rest = key.removeprefix("map_k")
    k = rest.split("_")[0]
    rule = "empty classes left out" if key.endswith("skip_empty") else "empty classes as 0"
    return f"mAP of images with {k.removesuffix('plus')}{' or more' if k.endswith('plus') else ''} labels, {rule}"


def as_json(numbers: dict) -> dict:
    """Without NaN, which is not JSON."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in numbers.items()}


def write_classes(url: str, outcome: Outcome, names: list[str], ids: list[str]) -> None:
    rows = outcome.result.table(names, ids)
    best = outcome.result.classes
    for i, row in enumerate(rows):
        row["best_f1"] = _cell(best.best_f1[i])
        row["best_threshold"] = _cell(best.thresholds[i])
        if outcome.f1 is not None:
            row["f1"] = float(outcome.f1[i])
    write_table(url, rows)


def _cell(value: float) -> object:
    return float(value) if np.isfinite(value) else ""
