"""Other people's libraries beside ours (`pip install lacuna-trainer[peers]`): one that is missing is listed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Peers:
    """Which peers take part, in which version, and why the others do not."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.missing: list[dict[str, str]] = []

    def build(self, makers: Mapping[str, tuple[str, Callable[[], T]]]) -> dict[str, T]:
        """Those that can be built, of name → (distribution, how to build it)."""
        built = {}
        for name, (distribution, make) in makers.items():
            try:
                built[name] = make()
                self.versions[name] = importlib.metadata.version(distribution)
            except Exception as error:  # whatever a foreign library raises when a part of it is not there
                self.leave_out(name, error)
        return built

    def leave_out(self, name: str, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self.missing.append({"name": name, "reason": reason})
        print(f"{name} does not take part: {reason}", flush=True)

    def facts(self) -> dict[str, Any]:
        return {"versions": self.versions, "not_run": self.missing}
