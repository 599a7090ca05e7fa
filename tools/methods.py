"""Every method: its paper, the numbers to reach, what it remembers about each sample, what it needs, and its settings.

  lacuna methods                          all of them, one line each
  lacuna methods --family verelst         those of one family
  lacuna methods --needs nothing          those that need annotations and nothing else
  lacuna methods csl ll_r                 these in full: what they do, what each setting means
  lacuna methods --json                   everything, for programs
Bytes per sample are before compression; score maps are counted for images of 448 pixels (a 14 × 14 grid).
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from typing import Any

from lacuna.basics.errors import UserError
from lacuna.trainer.config.reported import as_text as numbers_text
from lacuna.trainer.config.reported import reported
from lacuna.trainer.config.tables import Numbers
from lacuna.trainer.methods import METHODS, example
from lacuna.trainer.methods.base import Method, Needs

_CLASSES = (80, 1000, 9600)
_WIDTH = 116
_WORDS: dict[str, Callable[[Needs], object]] = {
    "full-labels": lambda n: n.full_labels, "negatives": lambda n: n.negatives, "neighbors": lambda n: n.neighbors,
    "images": lambda n: n.maps or n.strong_view, "scores": lambda n: n.scores, "pass": lambda n: n.scored_pass,
    "two-views": lambda n: n.strong_view, "backbone": lambda n: n.backbone, "whole-batch": lambda n: n.whole_batch,
}
_LEGAL = [*_WORDS, "setting", "state", "nothing"]
_all_reported = functools.cache(reported)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, in full")
    parser.add_argument("--family", metavar="NAME", help="only those that share a paper or an idea (second column)")
    parser.add_argument("--needs", metavar="WORD", help=f"only those that need this: {', '.join(_LEGAL)} (state: they "
                        "remember something per sample; setting: one has no default; nothing: annotations will do)")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of text")


def run(args: argparse.Namespace) -> None:
    for name in args.names:
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"no method {name!r}; {hint}there are: {', '.join(METHODS)}.")
    chosen = choose(list(args.names or METHODS), args.family, args.needs)
    if args.json:
        print(json.dumps([describe(name) for name in chosen], indent=1, ensure_ascii=False))
    elif args.names:
        print("\n".join(as_text(describe(name)) for name in chosen))
    else:
        print("\n".join(as_table(chosen)))
        print("\n`lacuna methods NAME` says what one does and what its settings mean.")


def choose(names: list[str], family: str | None, need: str | None) -> list[str]:
    families = list(dict.fromkeys(family_of(METHODS[name]) for name in METHODS))
    if family is not None and family not in families:
        raise UserError(f"--family {family}: there is no such family; there are: {', '.join(families)}.")
    if need is not None and need not in _LEGAL:
        raise UserError(f"--needs {need}: write one of {', '.join(_LEGAL)}.")
    found = [name for name in names if family in (None, family_of(METHODS[name]))]
    if need is None:
        return found
    return [name for name in found if need in (words(example(name, _CLASSES[0])) or ["nothing"])]


def family_of(kind: type[Method]) -> str:
    """The room of its file: `cole`, `verelst`, …; of one that was added from outside, its module."""
    return kind.__module__.rpartition(".methods.")[2].split(".")[0]


def words(method: Method) -> list[str]:
    """What a method needs besides annotations, in the words of --needs."""
    asked = method.needs()
    found = [word for word, wanted in _WORDS.items() if wanted(asked)]
    required = any(setting["required"] for setting in settings_of(type(method)))
    return found + ["setting"] * required + ["state"] * bool(method.fields())


def as_table(names: list[str]) -> list[str]:
    rows = [("method", "family", "paper", "bytes", "needs")]
    for name in names:
        kind, method = METHODS[name], example(name, _CLASSES[0])
        size = sum(f.row_bytes for f in method.fields())
        rows.append((name, family_of(kind), _cited(kind.paper), f"{size:,}" if size else "–",
                     ", ".join(words(method)) or "nothing"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}  {e}" for a, b, c, d, e in rows]
    return [*lines, "", f"bytes: remembered per sample at {_CLASSES[0]} classes"]


def _cited(paper: str) -> str:
    """Authors and year."""
    year = re.search(r"\b(19|20)\d\d\b", paper)
    return " ".join([re.split("[,;:(]", paper)[0].strip(), *([year[0]] if year else [])])


def describe(name: str) -> dict[str, Any]:
    """What `--json` prints about one method."""
    kind = METHODS[name]
    method = example(name, _CLASSES[0])
    return {
        "name": name,
        "family": family_of(kind),
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


def as_text(entry: dict[str, Any]) -> str:
    kept = ", ".join(f"{name} {shape}" for name, shape in entry["class_state"].items())
    rows = [("paper", entry["paper"]), ("about", entry["about"]), ("reported", _reported(entry["reported"])),
            ("state", _state(entry)), ("class", kept), ("needs", ", ".join(entry["needs"]))]
    lines = [entry["name"]]
    for title, text in rows:
        lines += textwrap.wrap(text or "–", _WIDTH, initial_indent=f"  {title:<9} ", subsequent_indent=" " * 12)
    for s in entry["settings"]:
        value = "(required)" if s["required"] else f"= {_plain(s['default'])}"
        lines.append(f"  {s['name']} {value}")
        lines += textwrap.wrap(s["about"], _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    return "none" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def _reported(found: dict[str, dict[str, Numbers]]) -> str:
    rows = {config: numbers for of_dataset in found.values() for config, numbers in of_dataset.items()}
    return "; ".join(f"{config} {numbers_text(numbers)}" for config, numbers in rows.items())


def _state(entry: dict[str, Any]) -> str:
    if not entry["state"]:
        return ""
    fields = ", ".join(f"{f['field']} {f['dtype']}" for f in entry["state"])
    sizes = ", ".join(f"{count:,} B at L = {n}" for n, count in entry["bytes_per_sample"].items())
    return f"{fields}: per sample {sizes}"
