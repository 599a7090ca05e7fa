"""Configs as people write them: a YAML file and `section.key=value` overrides, merged as plain dicts, validated once.

A YAML file may name a base with `base: other.yaml`, or several with `base: [data.yaml, model.yaml]` (relative to
itself); later bases win over earlier ones, its own keys over all.
"""

from __future__ import annotations

import os
from typing import Any

import yaml

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.whole_number import whole_number
from lacuna.trainer.config.sections import Config, parse_config


def load_config(path: str, overrides: list[str]) -> Config:
    """Read, merge and validate; every mistake is a UserError that names the key."""
    body = _read_yaml(path)
    parsed = [_parse_override(override) for override in overrides]
    # A method's name first: another method drops the settings of the one before it, not those given beside it.
    for keys, value, override in sorted(parsed, key=lambda o: o[0] != ["method", "name"]):
        old = body.get("method")
        if keys == ["method", "name"] and isinstance(old, dict) and old.get("name") != value:
            body["method"] = {}
        _set(body, keys, value, override)
    return parse_config(body, path)


def _parse_override(override: str) -> tuple[list[str], Any, str]:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override {override!r}: write section.key=value, e.g. train.precision=bf16.")
    try:
        return key.strip().split("."), yaml.safe_load(text), override
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


def _read_yaml(path: str, seen: tuple[str, ...] = ()) -> dict:
    named = f"{seen[-1]}: base {path}" if seen else f"--config {path}"
    if path in seen:
        raise UserError(f"{named} leads back to itself.")
    try:
        body = yaml.load(storage.read_bytes(path).decode(), _Loader)  # a SafeLoader
    except UserError:
        raise  # object storage, in its own words
    except OSError as error:
        raise UserError(f"{named}: cannot be read ({(error.strerror or str(error)).lower()}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({error}).") from None
    if not isinstance(body, dict):
        raise UserError(f"{path}: expected keys and values, found {type(body).__name__}.")
    bases = body.pop("base", None) or []
    merged: dict = {}
    for base in bases if isinstance(bases, list) else [bases]:
        merged = merge(merged, _read_yaml(os.path.join(os.path.dirname(path), str(base)), (*seen, path)))
    return merge(merged, body)


def merge(base: dict, top: dict) -> dict:
    """Keys of `top` win; nested sections are merged, everything else is replaced. Another method starts afresh."""
    out = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        other_method = key == "method" and both and value.get("name", out[key].get("name")) != out[key].get("name")
        out[key] = merge(out[key], value) if both and not other_method else value
    return out


def _set(body: dict, path: list[str], value: Any, override: str) -> None:
    node: Any = body
    for i, part in enumerate(path):
        last = i == len(path) - 1
        if isinstance(node, list):
            number = whole_number(part)
            if number is None or number >= len(node):
                raise UserError(f"override {override!r}: {'.'.join(path[:i])} is a list; "
                                f"use an index 0..{len(node) - 1}.")
            part = number  # type: ignore[assignment]
        elif not isinstance(node, dict):
            raise UserError(f"override {override!r}: {'.'.join(path[:i])} is a single value, it has no keys.")
        if last:
            node[part] = value
        else:
            if isinstance(node, dict) and node.get(part) is None:
                node[part] = {}  # absent, or switched off with null
            node = node[part]
