"""What a search found, as files: search.json (all of it), trials.csv, best.yaml and, of several methods, one each."""

from __future__ import annotations

import csv
import io
import itertools
import json
import statistics
from typing import Any

import yaml

from lacuna.basics import storage
from lacuna.tools.tune.search import SearchWork, trial_name
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.config.spaces import Dimension

SEARCH = "search.json"
_BINS = 3  # of a range, when asked how much it mattered
_COLUMNS = ("trial", "method", "number", "status", "epochs", "score", "first_score", "seconds", "reason", "folder")


def write(work: SearchWork, source: str, left_out: dict[str, str], config: Config) -> dict[str, Any]:
    """After every outcome: a search that is killed has told what it found so far."""
    work.timer.write()
    found = gather(work, source, left_out)
    storage.write_atomic(storage.join(work.out, SEARCH), json.dumps(found, indent=1).encode())
    storage.write_atomic(storage.join(work.out, "trials.csv"), as_csv(found["trials"]).encode())
    for method in work.contenders:
        trial = work.best(method)
        if trial is None:
            continue
        text = _best(work, method, trial, config).encode()
        if len(work.contenders) > 1:
            storage.write_atomic(storage.join(work.out, f"best-{method}.yaml"), text)
        if method == found["best_method"]:
            storage.write_atomic(storage.join(work.out, "best.yaml"), text)
    return found


def gather(work: SearchWork, source: str, left_out: dict[str, str]) -> dict[str, Any]:
    trials, method = work.facts(), work.best_method()
    best = {m: trial_name(m, t) for m in work.contenders if (t := work.best(m)) is not None}
    return {"config": source, "seconds": round(work.timer.seconds(), 1), "tune": work.tune.model_dump(mode="json"),
            "rungs": work.parts, "epochs": work.epochs, "left_out": left_out, "best_method": method,
            "best": best.get(method or ""), "best_of_methods": best, "trials": trials,
            "mattered": {m: mattered([t for t in trials if t["method"] == m], contender.space)
                         for m, contender in work.contenders.items()},
            "spaces": {m: {key: {"kind": d.kind, "values": list(d.values)} for key, d in contender.space.items()}
                       for m, contender in work.contenders.items()}}


def _best(work: SearchWork, method: str, trial: int, config: Config) -> str:
    """A config that `lacuna train` takes, test set and all; it trains under a name of its own."""
    name = config.name + (f"-{method}" if len(work.contenders) > 1 else "")
    body = {**work.contenders[method].body_of(trial), "name": f"{name}-best", "run_folder": config.run_folder}
    body["data"]["test"] = config.data.test and config.data.test.model_dump()
    rung, score, _ = work.standing(method, trial) or (0, 0.0, 0)
    whole = "" if rung + 1 == len(work.parts) else " before its end"
    resolved = parse_config(body, "best.yaml").model_dump(mode="json")
    return (f"# Trial {trial_name(method, trial)} of {work.out}: validation mAP {score:.3f}{whole}.\n"
            f"# Train: lacuna train best.yaml; its own weights are in {work.config(method, trial).folder}.\n"
            + yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))


def as_csv(trials: list[dict[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for trial in trials for key in trial["settings"]))
    out = io.StringIO()
    table = csv.DictWriter(out, [*_COLUMNS[:3], *keys, *_COLUMNS[3:]], lineterminator="\n")
    table.writeheader()
    for trial in trials:
        table.writerow({**{key: trial[key] for key in _COLUMNS}, **trial["settings"]})
    return out.getvalue()


def mattered(trials: list[dict[str, Any]], space: dict[str, Dimension]) -> dict[str, float | None]:
    """Which part of the differences between scores goes with each setting alone, what chance gives taken off (ω²).

    By the scores at the first rung, which all trials have; ranges in three parts with as many trials each.
    """
    seen = [t for t in trials if t["first_score"] is not None and t["settings"]]
    return {key: _explained(seen, key, dimension) for key, dimension in space.items()}


def _explained(trials: list[dict[str, Any]], key: str, dimension: Dimension) -> float | None:
    if dimension.kind == "choice":
        groups: dict[str, list[float]] = {}
        for trial in trials:
            groups.setdefault(repr(trial["settings"][key]), []).append(trial["first_score"])
        parts = list(groups.values())
    else:
        ranked = [t["first_score"] for t in sorted(trials, key=lambda t: t["settings"][key])]
        cuts = [i * len(ranked) // _BINS for i in range(_BINS + 1)]
        parts = [ranked[low:high] for low, high in itertools.pairwise(cuts) if low < high]
    scores = [score for part in parts for score in part]
    free = len(scores) - len(parts)
    if len(parts) < 2 or free < 1:
        return None
    mean = statistics.fmean(scores)
    between = sum(len(part) * (statistics.fmean(part) - mean) ** 2 for part in parts)
    total = sum((score - mean) ** 2 for score in scores)
    within = (total - between) / free
    if total == 0:
        return None
    return round(min(1.0, max(0.0, (between - (len(parts) - 1) * within) / (total + within))), 3)
