"""What the page says about a search (`lacuna tune`): what mattered, the best curves, mAP against each setting."""

from __future__ import annotations

import json
import math
from typing import Any

from lacuna.basics.errors import UserError
from lacuna.tools.passes.parts import absolute
from lacuna.tools.run_files import read_file, run_name
from lacuna.tools.tune.findings import SEARCH

_CURVES = 8
_SHOWN = ("trial", "method", "status", "epochs", "score", "seconds", "reason")


def read_search(path: str) -> dict[str, Any] | None:
    """What a search found; None if the folder is not one."""
    text = read_file(absolute(path), SEARCH)
    return None if text is None else json.loads(text)


def best_runs(path: str, found: dict[str, Any]) -> list[str]:
    """Run folders of the best trial of every method, the best of all last: the headline takes the first run for the
    baseline of the others."""
    names = sorted(found["best_of_methods"].values(), key=lambda name: name == found["best"])
    folders = {trial["trial"]: trial["folder"] for trial in found["trials"]}
    if not names:
        raise UserError(f"{path}: no trial of this search has a score yet; `lacuna tune` goes on with it.")
    return [folders[name] for name in names]


def search_data(path: str, found: dict[str, Any]) -> dict[str, Any]:
    ranked = sorted((t for t in found["trials"] if t["score"] is not None and t["status"] != "failed"),
                    key=lambda t: (-t["epochs"], -t["score"]))
    return {"name": run_name(path), "best": found["best"], "seconds": found["seconds"], "left_out": found["left_out"],
            "trials": [{key: t[key] for key in _SHOWN} | {"settings": as_text(t["settings"])} for t in found["trials"]],
            "curves": [{"name": t["trial"], "points": [[i + 1, v] for i, v in enumerate(t["curve"])]}
                       for t in ranked[:_CURVES]],
            "mattered": [[method, key, share] for method, settings in found["mattered"].items()
                         for key, share in settings.items()],
            "settings": [_cloud(method, key, dimension, found["trials"])
                         for method, space in found["spaces"].items() for key, dimension in space.items()]}


def as_text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "the config as it stands"


def _cloud(method: str, key: str, dimension: dict[str, Any], trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Score against one setting; words stand at 0, 1, 2 … in the order of the choices."""
    choices, kind = dimension["values"], dimension["kind"]
    words = kind == "choice" and not all(isinstance(c, int | float) and not isinstance(c, bool) for c in choices)
    spread = not words and min(choices) > 0 and max(choices) / min(choices) >= 10
    scored = [t for t in trials if t["method"] == method and key in t["settings"] and t["score"] is not None]

    def place(value: Any) -> float:
        return choices.index(value) if words else math.log10(value) if spread else value

    axis = f"log10 of {key}" if spread else f"{key} ({', '.join(map(str, choices))})" if words else key
    return {"method": method, "key": key, "axis": axis,
            "clouds": [{"name": name, "names": [t["trial"] for t in group],
                        "points": [[place(t["settings"][key]), t["score"]] for t in group]}
                       for name, group in (("to the end", [t for t in scored if t["status"] == "finished"]),
                                           ("dropped before", [t for t in scored if t["status"] != "finished"]))]}
