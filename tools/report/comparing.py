"""What several runs say together: AP of every class, the gap that each closes, what their configs differ in."""

from __future__ import annotations

from typing import Any

from lacuna.tools.report.recorded_run import RecordedRun
from lacuna.trainer.config.sections import flat

_BASELINE = "an"


def class_table(folders: list[RecordedRun]) -> dict[str, Any]:
    """Rows in the first run's class order; `ap` and `annotated` have one entry a run (None: no such class)."""
    # One set for all: AP on the test set beside AP on the validation set would not be a comparison.
    split = "test" if all(folder.class_rows("test") for folder in folders) else "val"
    tables = [folder.class_rows(split) for folder in folders]
    annotated = [folder.annotated_fraction() for folder in folders]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for name in names:
        first = next(table[name] for table in tables if name in table)
        rows.append({"name": name, "id": first["id"], "positives": first["positives"],
                     "ap": [table[name]["ap"] if name in table else None for table in tables],
                     "annotated": [fractions.get(name) for fractions in annotated]})
    return {"runs": [folder.name for folder in folders], "split": split, "rows": rows}


def gap_closed(folders: list[RecordedRun], oracle: RecordedRun) -> dict[str, Any]:
    """(run − baseline) ÷ (oracle − baseline) of the test mAP; the baseline is the AN run, or else the first."""
    baseline = next((f for f in folders if f.config.method["name"] == _BASELINE), folders[0])
    split = "test" if all(f.scores()["test"] is not None for f in folders) else "val"
    low, high = baseline.scores()[split], oracle.scores()[split]
    rows = []
    for folder in folders:
        score = folder.scores()[split]
        known = None not in (score, low, high) and high != low
        rows.append({"run": folder.name, "method": folder.config.method["name"], "score": score,
                     "closed": (score - low) / (high - low) if known else None})  # type: ignore[operator]
    return {"split": split, "baseline": baseline.name, "oracle": oracle.name, "rows": rows}


def config_differences(folders: list[RecordedRun]) -> dict[str, Any]:
    """Keys whose values are not the same in all runs; of a single run, all its keys."""
    bodies = [flat(folder.config.model_dump(mode="json")) for folder in folders]
    keys = sorted({key for body in bodies for key in body})
    if len(folders) > 1:
        keys = [key for key in keys if len({repr(body.get(key)) for body in bodies}) > 1]
    return {"runs": [folder.name for folder in folders],
            "rows": [[key, *("" if body.get(key) is None else str(body[key]) for body in bodies)] for key in keys]}
