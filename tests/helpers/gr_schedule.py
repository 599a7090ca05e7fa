"""The schedule of GR and of the methods built on it, by its published formula."""

from __future__ import annotations


def schedule_by_formula(t, last, n, slope=(0, 2), offset=(-2, -2), center=(0.5, 0.8), width=(2, 0.5), **_):
    """t from 1, as published."""
    late, early = max(t - n - 1, 0) / (last - n), max(t - n, 0) / (last - n)
    return [ends[0] + (ends[1] - ends[0]) * share
            for ends, share in ((slope, late), (offset, late), (center, early), (width, early))]
