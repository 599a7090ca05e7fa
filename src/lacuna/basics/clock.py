"""Time as people read it."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:05."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}"
