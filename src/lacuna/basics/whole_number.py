"""Numbers in foreign text. `str.isdigit` says yes to ¹ and to a million nines, for both of which `int` raises."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)  # 18 of them fit an int64


def whole_number(text: str) -> int | None:
    """The number ≥ 0 that the text is, or None; white space around it does not count."""
    text = text.strip()
    return int(text) if _DIGITS.fullmatch(text) else None
