"""Durations as people write them: `500st` (steps), `2ep` (epochs), `5%` (of the phase); and as they read them."""

from __future__ import annotations

import re
from typing import Any

from lacuna.basics.errors import UserError

_FORM = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(st|ep|%)\s*$")


def check_duration(text: Any) -> str:
    if not isinstance(text, str) or not _FORM.match(text):
        raise UserError(f"duration {text!r}: write steps as '500st', epochs as '2ep' or a part of the phase as '5%'.")
    return text


def check_positive_duration(text: Any) -> str:
    if is_zero(check_duration(text)):
        raise UserError(f"duration {text!r} must be longer than 0.")
    return text


def is_zero(text: str) -> bool:
    return to_steps(text, 1, 1) == 0


def to_steps(text: str, steps_per_epoch: int, total_steps: int) -> int:
    """0 only for a duration of 0: 'every 1%' of a short phase still happens, at every step."""
    match = _FORM.match(text)
    assert match, text
    amount, unit = float(match[1]), match[2]
    steps = {"st": amount, "ep": amount * steps_per_epoch, "%": amount / 100 * total_steps}[unit]
    return max(1, round(steps)) if amount else 0
