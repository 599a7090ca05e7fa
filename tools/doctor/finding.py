"""What a check of `lacuna doctor` says: one fact, how bad it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    check: str
    level: str  # OK, WARNING or PROBLEM
    found: str
    advice: str = ""
