"""The entries worth considering: of every class the highest by some score, whatever the number of samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lacuna.tools.select.quota import Quota
from lacuna.tools.suggest.evidence import Scored

PLACE = np.dtype([("value", "<f4"), ("belief", "<f4"), ("shard", "<i4"), ("row", "<i4")])
Value = Callable[[int, np.ndarray], np.ndarray]  # (shard, beliefs [n, L]) → values [n, L]


def highest(scored: Scored, value: Value, most: int, quota: Quota) -> list[np.ndarray]:
    """Per class PLACE [≤ most], by falling value; equal ones in the order of the shards. Of a group only the first."""
    kept = [np.zeros(0, PLACE) for _ in range(scored.source.classes)]
    for shard, part, labels in scored.shards():
        values, unknown = value(shard, part["scores"]), scored.open_entries(shard, part["rows"], labels)
        for cls in range(scored.source.classes):
            here = np.flatnonzero(unknown[:, cls])
            fresh = np.empty(len(here), PLACE)
            fresh["value"], fresh["belief"] = values[here, cls], part["scores"][here, cls]
            fresh["shard"], fresh["row"] = shard, part["rows"][here]
            joined = np.concatenate([kept[cls], fresh])
            kept[cls] = quota.best(joined[np.argsort(-joined["value"], kind="stable")])[:most]
    return kept


def vectors_of(scored: Scored, places: list[np.ndarray]) -> list[np.ndarray]:
    """Features float32 [m, D] of every class's places."""
    wanted: dict[int, list[tuple[int, int, int]]] = {}
    for cls, found in enumerate(places):
        for at, place in enumerate(found):
            wanted.setdefault(int(place["shard"]), []).append((cls, at, int(place["row"])))
    made: list[np.ndarray | None] = [None] * len(places)
    for shard, part in scored.parts.read_all(list(wanted)):
        where = {int(row): i for i, row in enumerate(part["rows"])}
        for cls, at, row in wanted[shard]:
            vectors = made[cls]
            if vectors is None:
                vectors = made[cls] = np.zeros((len(places[cls]), part["features"].shape[1]), np.float32)
            vectors[at] = part["features"][where[row]]
    return [np.zeros((0, 1), np.float32) if vectors is None else vectors for vectors in made]
