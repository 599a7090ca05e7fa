"""What is kept in the folder of caches: one folder per view, with the facts that its address is a hash of."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np

from lacuna.basics import storage
from lacuna.basics.json_text import parse_json
from lacuna.state_store.derived import filled_rows
from lacuna.trainer.cache.views import FACTS

_ADDRESS = re.compile(r"[0-9a-f]{24}$")
_DAY = 86_400.0


@dataclass(frozen=True)
class Kept:
    """One view; an unknown one (its facts were never written, or are damaged) can only be removed."""

    address: str
    body: dict
    samples: int = 0
    shards: int = 0

    @property
    def bytes(self) -> int:
        return self.shards * self.body["row_bytes"] * max(self.body["counts"]) if self.body else 0

    @property
    def idle_days(self) -> float:
        return (time.time() - self.body.get("used", 0.0)) / _DAY

    def facts(self) -> dict:
        return {"address": self.address, "bytes": self.bytes, "samples": self.samples, **self.body}

    def __str__(self) -> str:
        if not self.body:
            return f"{self.address}: unknown ({FACTS} is missing or damaged)"
        b = self.body
        view = "the view of evaluation" if b["view"] is None else f"view {b['view']} (seed {b['seed']})"
        return (f"{self.address}: {b['backbone']} at {b['image_size']} px, {b['cut']}, {view} of {b['data']}: "
                f"{self.samples:,} of {sum(b['counts']):,} samples, {self.bytes / 1e6:,.1f} MB, used "
                f"{max(0.0, self.idle_days):.1f} days ago")


def everything(url: str) -> list[Kept]:
    return [_look(url, name) for name in storage.list_names(url) if _ADDRESS.fullmatch(name)]


def prune(url: str, days: float) -> list[Kept]:
    """Remove what was not used for so long; a run that still reads one of them computes it again."""
    found = [kept for kept in everything(url) if not kept.body or kept.idle_days >= days]
    for kept in found:
        storage.remove_tree(storage.join(url, kept.address))
    return found


def _look(url: str, address: str) -> Kept:
    folder = storage.join(url, address)
    try:
        body = parse_json(storage.read_bytes(storage.join(folder, FACTS)))
        counts = np.asarray(body["counts"], np.int64)
        shards = [int(name) for name in storage.list_names(storage.join(folder, "shards")) if name.isdecimal()]
        samples = sum(int(filled_rows(folder, s, int(counts[s])).sum()) for s in shards if s < len(counts))
        return Kept(address, body, samples, len(shards)) if body["row_bytes"] else Kept(address, {})
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
        return Kept(address, {})
