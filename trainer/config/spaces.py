"""What a search tries: settings by their keys, each with choices or a range, as configs and tables write them.

  phases.0.lr: {log: [1e-4, 1e-1]}      any number between, all magnitudes alike
  phases.0.batch: [16, 64]              one of these
  method.gamma: {range: [0, 1]}         any number between
  phases.0.epochs: {whole: [5, 20]}     any whole number between, ends included
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

from lacuna.basics.errors import UserError

Kind = Literal["choice", "log", "range", "whole"]
_FORMS = "write a list of choices, {log: [low, high]}, {range: [low, high]} or {whole: [low, high]}"
_DIGITS = 3  # of a drawn number: more tell nothing, and people read them


@dataclass(frozen=True)
class Dimension:
    """Where one setting may lie. `values`: the choices, or the two ends of a range."""

    kind: Kind
    values: tuple[Any, ...]

    def at(self, part: float) -> Any:
        """The value at a place between 0 and 1."""
        if self.kind == "choice":
            return self.values[min(int(part * len(self.values)), len(self.values) - 1)]
        low, high = self.values
        if self.kind == "whole":
            return min(low + int(part * (high - low + 1)), high)
        if self.kind == "log":
            return min(max(_rounded(low * (high / low) ** part), low), high)
        return min(max(_rounded(low + (high - low) * part), low), high)


Space = dict[str, Dimension]


def parse_space(body: Any, where: str) -> Space:
    if not isinstance(body, dict):
        raise UserError(f"{where}: expected settings and where each may lie, as in phases.0.lr: {{log: [1e-4, 1e-1]}}.")
    return {str(key): _dimension(value, f"{where}: {key}") for key, value in body.items()}


def _dimension(body: Any, where: str) -> Dimension:
    if isinstance(body, list):
        if not body:
            raise UserError(f"{where}: no choices; {_FORMS}.")
        return Dimension("choice", tuple(_number(choice) for choice in body))
    if not isinstance(body, dict) or len(body) != 1 or (kind := next(iter(body))) not in ("log", "range", "whole"):
        raise UserError(f"{where} = {body!r}: {_FORMS}.")
    ends = [_number(end) for end in body[kind]] if isinstance(body[kind], list) else []
    if len(ends) != 2 or not all(_is_number(end) for end in ends):
        raise UserError(f"{where} = {body!r}: {kind} needs the lowest and the highest number.")
    low, high = ends
    if low >= high:
        raise UserError(f"{where} = {body!r}: the first number must be lower than the second.")
    if kind == "log" and low <= 0:
        raise UserError(f"{where} = {body!r}: magnitudes begin above 0; use {{range: …}} for a setting that may be 0.")
    if kind == "whole" and not all(isinstance(end, int) for end in ends):
        raise UserError(f"{where} = {body!r}: both ends must be whole numbers.")
    return Dimension(kind, (low, high))


def _number(value: Any) -> Any:
    """YAML takes 1e-4 for text: it wants 1.0e-4."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def grid(space: Space, where: str) -> list[dict[str, Any]]:
    """All combinations of the choices, the first key slowest: how papers search."""
    for key, dimension in space.items():
        if dimension.kind != "choice":
            raise UserError(f"{where}: {key}: all combinations of a range cannot be tried; give a list of choices.")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*(d.values for d in space.values()))]
