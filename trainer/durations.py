"""Durations as people write them: `500st` (steps), `2ep` (epochs), `5%` (of the phase)."""

from __future__ import annotations

import re

from data_pipelines.errors import UserError

_FORM = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(st|ep|%)\s*$")


def check_duration(text: str) -> str:
    if not _FORM.match(text):
        raise UserError(f"duration {text!r}: write steps as '500st', epochs as '2ep' or a part of the phase as '5%'.")
    return text


def to_steps(text: str, steps_per_epoch: int, total_steps: int) -> int:
    """At least one step, so that 'every 1%' of a short phase still happens."""
    match = _FORM.match(text)
    assert match, text
    amount, unit = float(match[1]), match[2]
    steps = {"st": amount, "ep": amount * steps_per_epoch, "%": amount / 100 * total_steps}[unit]
    return max(1, round(steps))
