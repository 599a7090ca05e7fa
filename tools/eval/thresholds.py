"""Per-class thresholds, chosen on a validation set for the best F1 and kept for deployment: predict score >= threshold.

A class without validation positives has no threshold (null in the file): it is never predicted.
"""

from __future__ import annotations

import json

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.trainer.metrics.measures import RankingResult


def write_thresholds(url: str, result: RankingResult, names: list[str], ids: list[str], rule: str,
                     source: dict) -> None:
    stats = result.classes
    classes = [{"class": i, "id": ids[i] if ids else None, "name": names[i],
                "threshold": _finite(stats.thresholds[i]), "f1": _finite(stats.best_f1[i]),
                "positives": int(stats.positives[i])} for i in range(len(names))]
    body = {"rule": rule, **source, "classes": classes}
    storage.write_atomic(url, json.dumps(body, indent=1, ensure_ascii=False).encode())


def read_thresholds(url: str, names: list[str], ids: list[str], rule: str | None = None) -> np.ndarray:
    """float64 [L]; infinite for classes that are never predicted. `rule`: how they must be meant, if that matters."""
    try:
        body = json.loads(storage.read_bytes(url))
        found, meant = body["classes"], body.get("rule", rule)  # one written by hand need not say
        theirs = [(entry["id"], entry["name"]) for entry in found]
        values = np.array([np.inf if entry["threshold"] is None else float(entry["threshold"]) for entry in found])
    except FileNotFoundError:
        raise UserError(f"--thresholds {url}: no such file. Make it with --val … --thresholds-out.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--thresholds {url}: not a file that --thresholds-out wrote ({error!r}).") from None
    if rule is not None and meant != rule:
        raise UserError(f"--thresholds {url}: made for other scores ({meant}); the model's rule is: {rule}. "
                        "Choose them again with this model: `lacuna eval … --thresholds-out`.")
    ours = [(ids[i] if ids else None, names[i]) for i in range(len(names))]
    if theirs != ours:
        place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
        raise UserError(f"--thresholds {url}: {len(theirs)} classes, the labels have {len(ours)}, or in another order: "
                        f"class {place} is {theirs[place] if theirs else None}, here {ours[place]}.")
    return values


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
