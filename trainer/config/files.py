"""Configs as people write them: a YAML file and `section.key=value` overrides, merged as plain dicts, validated once.

A YAML file may name a base with `base: other.yaml`, or several with `base: [data.yaml, model.yaml]` (relative to
itself); later bases win over earlier ones, its own keys over all. A file with `rows` is a table (tables.py), of which
`FILE:ROW` is one experiment. What ships goes by its name from anywhere: `demo`, `cole:coco14_an_linear`.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import yaml

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.places import CONFIGS
from lacuna.basics.whole_number import whole_number
from lacuna.basics.yaml_text import parse_yaml
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.config.tables import Table, closest, is_table, parse_table, pick

Change = tuple[list[str], Any, str]
"""Keys that lead to a setting, its new value, and how the reader of an error knows the change."""


def load_config(source: str, overrides: list[str]) -> Config:
    """Read, merge and validate; every mistake is a UserError that names the key.

    `source`: a file or URL, a table's row as FILE:ROW, or either by the name of what ships.
    """
    return parse_config(changed(read_body(source), parse_overrides(overrides)), source)


def parse_overrides(overrides: list[str]) -> list[Change]:
    return [_parse_override(override) for override in overrides]


def changed(body: dict, changes: list[Change]) -> dict:
    """A body with changes made to it, which itself stays as it is; the result is checked by `parse_config`."""
    body = copy.deepcopy(body)
    body.pop("tune", None)  # what `lacuna tune` searches is no part of a run
    # A method's name first: another method drops the settings of the one before it, not those given beside it.
    for keys, value, named in sorted(changes, key=lambda change: change[0] != ["method", "name"]):
        old = body.get("method")
        if keys == ["method", "name"] and isinstance(old, dict) and old.get("name") != value:
            body["method"] = {}
        _set(body, keys, copy.deepcopy(value), named)
    return body


def _parse_override(override: str) -> Change:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override {override!r}: write section.key=value, e.g. train.precision=bf16.")
    try:
        return key.strip().split("."), yaml.safe_load(text), f"override {override!r}"
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or error
        raise UserError(f"override {override!r}: {text!r} is not valid YAML ({reason}). Quote it: \"'…'\".") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, of which YAML would silently take the last."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        double = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if double is not None:
            raise yaml.YAMLError(f"key {double!r} twice, line {node.start_mark.line + 1} ff.")
        return super().construct_mapping(node, deep)


def read_body(source: str, beside: str = "", seen: tuple[str, ...] = ()) -> dict:
    """A config with its bases merged, not yet validated; `beside`: the folder that `source` is relative to."""
    path, row = locate(source, beside)
    own = path if row is None else f"{path}:{row}"
    named = f"{seen[-1]}: base {source}" if seen else f"config {source}"
    if own in seen:
        raise UserError(f"{named} leads back to itself.")
    body = read_yaml(path, named)
    if is_table(body):
        where = path if beside else source.removesuffix(f":{row}")
        experiment = pick(parse_table(body, where), row, where)
        return merge_layers(read_bases(experiment.bases, path, (*seen, own)), experiment.settings)
    if row is not None:
        raise UserError(f"{named}: {path} is no table, it has no row {row!r}. Leave out :{row}.")
    bases = body.pop("base", None) or []
    return merge(read_bases(bases if isinstance(bases, list) else [bases], path, (*seen, own)), body)


def read_bases(bases: list, path: str, seen: tuple[str, ...] = ()) -> dict:
    """Bases of the file at `path`, merged; later ones win."""
    return merge_layers({}, [read_body(str(base), os.path.dirname(path), seen or (path,)) for base in bases])


def read_table(source: str) -> Table | None:
    """The table that a name, path or URL stands for; None if it is another config."""
    body = read_yaml(locate(source)[0], source)
    return parse_table(body, source) if is_table(body) else None


def locate(source: str, beside: str = "") -> tuple[str, str | None]:
    """(path or URL, row of a table): a file if there is one or the name ends in .yaml, else what ships by that name."""
    head, colon, tail = source.rpartition(":")
    has_row = colon and "/" not in tail and not os.path.isfile(os.path.join(beside, source))
    head, row = (head, tail) if has_row else (source, None)
    path = os.path.join(beside, head)
    if "://" in path or path.endswith((".yaml", ".yml")) or os.path.isfile(path):
        return path, row
    if head not in shipped():
        if os.path.exists(path):
            return path, row  # a folder, say: reading it says so
        hint = closest(head, shipped(), "these do")
        raise UserError(f"config {source}: {head!r} is neither a file nor a config that ships; {hint}")
    return os.path.join(CONFIGS, f"{head}.yaml"), row


def shipped() -> list[str]:
    """Names of the configs that come with the package, those of the bases as base/NAME."""
    found = []
    for folder, prefix in ((CONFIGS, ""), (os.path.join(CONFIGS, "base"), "base/")):
        found += sorted(prefix + name.removesuffix(".yaml") for name in os.listdir(folder) if name.endswith(".yaml"))
    return found


def read_yaml(path: str, named: str) -> dict:
    """Keys and values of one file; `named`: how the reader of an error knows it."""
    try:
        body = parse_yaml(storage.read_bytes(path).decode(), _Loader)
    except UserError:
        raise  # object storage, in its own words
    except OSError as error:
        raise UserError(f"{named}: cannot be read ({(error.strerror or str(error)).lower()}). "
                        "`lacuna configs` lists what ships.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({error}).") from None
    if not isinstance(body, dict):
        raise UserError(f"{path}: expected keys and values, found {type(body).__name__}.")
    return body


def merge(base: dict, top: dict) -> dict:
    """Keys of `top` win; nested sections are merged, everything else is replaced. Another method starts afresh."""
    out = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        other_method = key == "method" and both and value.get("name", out[key].get("name")) != out[key].get("name")
        out[key] = merge(out[key], value) if both and not other_method else value
    return out


def merge_layers(base: dict, layers: list[dict]) -> dict:
    for layer in layers:
        base = merge(base, layer)
    return base


def _set(body: dict, path: list[str], value: Any, named: str) -> None:
    node: Any = body
    for i, part in enumerate(path):
        last = i == len(path) - 1
        if isinstance(node, list):
            number = whole_number(part)
            if number is None or number >= len(node):
                raise UserError(f"{named}: {'.'.join(path[:i])} is a list; "
                                f"use an index 0..{len(node) - 1}.")
            part = number  # type: ignore[assignment]
        elif not isinstance(node, dict):
            raise UserError(f"{named}: {'.'.join(path[:i])} is a single value, it has no keys.")
        if last:
            node[part] = value
        else:
            if isinstance(node, dict) and node.get(part) is None:
                node[part] = {}  # absent, or switched off with null
            node = node[part]
