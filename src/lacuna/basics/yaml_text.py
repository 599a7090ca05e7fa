"""YAML from files that may be damaged or hostile: every way it can be wrong is a yaml.YAMLError."""

from __future__ import annotations

from typing import Any

import yaml

_MOST = 100_000  # values, aliases written out: a few lines of them can stand for more than any memory holds


def parse_yaml(text: str | bytes, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Like yaml.safe_load; what would unfold to very many values, or never end, is refused."""
    try:
        body = yaml.load(text, loader)  # a SafeLoader
        count = _values(body, {}, set())
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:  # a date or a number that there is not
        raise yaml.YAMLError(str(error)) from None
    if count > _MOST:
        raise yaml.YAMLError(f"its aliases unfold to {count:,} values, more than {_MOST:,}")
    return body


def _values(node: Any, known: dict[int, int], above: set[int]) -> int:
    """How many values there are when every alias is written out; each is looked at once."""
    parts = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else None
    if parts is None:
        return 1
    if id(node) in above:
        raise yaml.YAMLError("an alias stands inside of what it names")
    if id(node) not in known:
        above.add(id(node))
        known[id(node)] = 1 + sum(_values(part, known, above) for part in parts)
        above.remove(id(node))
    return known[id(node)]
