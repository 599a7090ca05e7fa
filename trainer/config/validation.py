"""From plain dicts to checked settings: every mistake is named with its key, its value and what is legal."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from lacuna.basics.errors import UserError
from lacuna.basics.whole_number import whole_number


def validated(model: type, body: dict, where: str) -> Any:
    """An instance of a pydantic model; unknown keys get the closest legal one suggested."""
    try:
        return model.model_validate(body)  # type: ignore[attr-defined]
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(model, e) for e in error.errors())) from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply.") from None


def _explain(model: type, error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        legal = _legal_keys(model, path[:-1])
        close = difflib.get_close_matches(path[-1], legal, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"legal keys: {', '.join(sorted(legal))}."
        return f"unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"key {key!r} is required."
    reason = error["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{key}: {reason}." if isinstance(error["input"], dict) else f"{key} = {error['input']!r}: {reason}."


def _legal_keys(model: Any, path: list[str]) -> list[str]:
    for part in path:
        if whole_number(part) is not None:
            continue
        annotation = model.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), model)
    return list(model.model_fields)
