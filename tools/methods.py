"""Every method: its paper, the numbers to reach, what it remembers about each sample, what it needs, and its settings.

  lacuna methods              all of them, with settings and defaults
  lacuna methods csl ll_r     these, with what each setting means
  lacuna methods --json       the same for programs
Bytes per sample are before compression; score maps are counted for images of 448 pixels (a 14 × 14 grid).
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import json
import textwrap
from typing import Any

from lacuna.basics.errors import UserError
from lacuna.trainer.config.reported import as_text as numbers_text
from lacuna.trainer.config.reported import reported
from lacuna.trainer.config.tables import Numbers
from lacuna.trainer.methods import METHODS, example
from lacuna.trainer.methods.base import Method

_CLASSES = (80, 1000, 9600)
_WIDTH = 116
_all_reported = functools.cache(reported)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, in detail")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of text")


def run(args: argparse.Namespace) -> None:
    for name in args.names:
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"no method {name!r}; {hint}there are: {', '.join(METHODS)}.")
    entries = [describe(name) for name in args.names or METHODS]
    if args.json:
        print(json.dumps(entries, indent=1, ensure_ascii=False))
    else:
        print("\n".join(as_text(entry, detailed=bool(args.names)) for entry in entries))


def describe(name: str) -> dict[str, Any]:
    """What `--json` prints about one method."""
    kind = METHODS[name]
    method = example(name, _CLASSES[0])
    return {
        "name": name,
        "paper": kind.paper,
        "about": " ".join((kind.__doc__ or "").split()),
        "state": [{"field": f.name, "dtype": f.dtype, "shape_at_80_classes": list(f.shape)} for f in method.fields()],
        "bytes_per_sample": {str(n): sum(f.row_bytes for f in example(name, n).fields()) for n in _CLASSES},
        "class_state": class_state(method),
        "needs": needs(method),
        "reported": reported_for(name),
        "settings": settings_of(kind),
        "module": inspect.getmodule(kind).__name__,  # type: ignore[union-attr]
    }


def reported_for(name: str) -> dict[str, dict[str, Numbers]]:
    """dataset → TABLE:ROW → what its paper reports."""
    found: dict[str, dict[str, Numbers]] = {}
    for entry in _all_reported():
        if entry.method == name:
            found.setdefault(entry.dataset, {})[entry.config] = entry.numbers
    return found


def class_state(method: Method) -> dict[str, str]:
    """What is kept once, not per sample: name → dtype and shape."""
    trained = dict(module.named_parameters() if (module := method.module()) else ())
    return {**method.class_state, **{f"{name} (trained)": f"float32 {list(t.shape)}" for name, t in trained.items()}}


def needs(method: Method) -> list[str]:
    asked = method.needs()
    found = [text for wanted, text in (
        (asked.full_labels, "full labels"),
        (asked.negatives, "verified negatives"),
        (asked.neighbors, "the setting neighbors (from `lacuna neighbors`)"),
        (asked.maps, "score maps (images, not feature shards)"),
        (bool(asked.scores), f"imported tables of scores: {', '.join(asked.scores)} (`lacuna import-scores`)"),
        (asked.scored_pass, "a pass over all training samples between epochs"),
        (asked.strong_view, "a second view of the same crop (data.strong_augment.crop: same)"
         if asked.same_crop else "a second, strongly augmented view (images, not feature shards)"),
        (asked.backbone, "phases that train parts of the backbone"),
        (asked.whole_batch, "the whole global batch at once (gradient accumulation "
         + ("is refused)" if asked.strong_view or method.module() else "costs a second forward)")),
    ) if wanted]
    return found + [f"the setting {s['name']}" for s in settings_of(type(method)) if s["required"]]


def settings_of(kind: type[Method]) -> list[dict[str, Any]]:
    return [{"name": key, "default": None if field.is_required() else field.get_default(call_default_factory=True),
             "required": field.is_required(), "about": " ".join((field.description or "").split())}
            for key, field in kind.settings_type.model_fields.items() if key != "name"]


def as_text(entry: dict[str, Any], detailed: bool) -> str:
    settings = ", ".join(s["name"] if s["required"] else f"{s['name']}={_plain(s['default'])}"
                         for s in entry["settings"])
    kept = ", ".join(f"{name} {shape}" for name, shape in entry["class_state"].items())
    rows = [("paper", entry["paper"]), ("reported", _reported(entry["reported"], detailed)),
            ("state", _state(entry)), ("class", kept), ("needs", ", ".join(entry["needs"])),
            ("settings", settings if not detailed else "")]
    if detailed:
        rows.insert(1, ("about", entry["about"]))
    lines = [entry["name"]]
    for title, text in rows:
        if text or not (detailed and title == "settings"):
            lines += textwrap.wrap(text or "–", _WIDTH, initial_indent=f"  {title:<9} ", subsequent_indent=" " * 12)
    if detailed:
        for s in entry["settings"]:
            value = "(required)" if s["required"] else f"= {_plain(s['default'])}"
            lines.append(f"  {s['name']} {value}")
            lines += textwrap.wrap(s["about"], _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    return "none" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def _reported(found: dict[str, dict[str, Numbers]], detailed: bool) -> str:
    rows = {config: numbers for of_dataset in found.values() for config, numbers in of_dataset.items()}
    if detailed:
        return "; ".join(f"{config} {numbers_text(numbers)}" for config, numbers in rows.items())
    tables = ", ".join(dict.fromkeys(config.partition(":")[0] for config in rows))
    return f"rows of {tables} ({', '.join(found)})" if rows else ""


def _state(entry: dict[str, Any]) -> str:
    if not entry["state"]:
        return ""
    fields = ", ".join(f"{f['field']} {f['dtype']}" for f in entry["state"])
    sizes = ", ".join(f"{count:,} B at L = {n}" for n, count in entry["bytes_per_sample"].items())
    return f"{fields}: per sample {sizes}"
