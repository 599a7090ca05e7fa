"""The one exception that means "mend your input"."""

from __future__ import annotations

from lacuna.basics.errors import UserError

__all__ = ["UserError"]
