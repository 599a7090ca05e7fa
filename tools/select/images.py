"""Whole images as questions: which images a person should look at and say of every class whether it is there.

The worth of an image is what its open entries are worth together, times how different it is from images that were
chosen or decided about before. Chosen one after the other: what an image is expected to bring lowers the need for it.
Legend: m candidates, L classes, D feature width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lacuna.tools.select.choosing import Wish, centred, first_allowed
from lacuna.tools.select.questions import Questions
from lacuna.tools.select.quota import Quota
from lacuna.tools.select.scores import LEAST_NOVELTY, need, uncertainty
from lacuna.tools.suggest.evidence import Scored

IMAGE = np.dtype([("value", "<f4"), ("shard", "<i4"), ("row", "<i4")])
_SPARE, _LEAST = 4, 1000  # candidates per question, and at least


@dataclass(frozen=True)
class Candidates:
    places: np.ndarray  # IMAGE [m], by falling value
    beliefs: np.ndarray  # float32 [m, L]; NaN where the entry is known
    features: np.ndarray  # float32 [m, D]
    decided: np.ndarray  # float32 [d, D]: of images about which somebody has decided something

    @property
    def open_beliefs(self) -> np.ndarray:
        """[m, L]: 0 where nothing is to be asked."""
        return np.nan_to_num(self.beliefs, nan=0.0)


def choose_images(scored: Scored, wish: Wish, quota: Quota) -> Questions:
    """All open entries of the chosen images (the likeliest, if there are too many), image after image."""
    found = candidates(scored, wish, quota)
    if wish.by in ("gain", "diverse"):
        order, values = in_turn(found, wish, quota)
    else:
        order = first_allowed(found.places, np.arange(len(found.places)), wish.budget, quota)
        values = found.places["value"][order]
    return _questions(found, order, values, wish.per_image)


def candidates(scored: Scored, wish: Wish, quota: Quota) -> Candidates:
    """The images of the highest values before any is chosen; for `diverse`, drawn at random among all."""
    most = max(_LEAST, _SPARE * wish.budget)
    typical = float(np.median(wish.positives))
    needed = np.asarray(need(wish.positives, typical))
    asked = {entry[:2] for entry in scored.decided}
    kept: Candidates | None = None
    for shard, part, labels in scored.shards():
        unknown = scored.open_entries(shard, part["rows"], labels)
        beliefs = np.where(unknown, part["scores"], np.nan).astype(np.float32)
        places = np.empty(len(beliefs), IMAGE)
        places["shard"], places["row"] = shard, part["rows"]
        if wish.by == "gain":
            places["value"] = np.nan_to_num(beliefs, nan=0.0) @ needed
        elif wish.by == "uncertain":
            places["value"] = np.nansum(uncertainty(beliefs), axis=1)
        else:
            places["value"] = np.random.default_rng([wish.seed, shard]).random(len(places))
        known = np.array([(shard, int(row)) in asked for row in part["rows"]], bool)
        features = part["features"].astype(np.float32)
        fresh = Candidates(places, beliefs, features, features[known])
        kept = _best(fresh if kept is None else _joined(kept, fresh), most, quota)
    assert kept is not None
    return kept


def _joined(first: Candidates, second: Candidates) -> Candidates:
    return Candidates(*(np.concatenate([getattr(first, name), getattr(second, name)])
                        for name in ("places", "beliefs", "features", "decided")))


def _best(found: Candidates, most: int, quota: Quota) -> Candidates:
    """Images with something to ask, by falling value; of a group only the first."""
    some = np.flatnonzero(~np.isnan(found.beliefs).all(axis=1))
    order = some[np.argsort(-found.places["value"][some], kind="stable")]
    numbered = np.empty(len(order), [("shard", "<i4"), ("row", "<i4"), ("at", "<i8")])
    numbered["shard"], numbered["row"] = found.places["shard"][order], found.places["row"][order]
    numbered["at"] = order
    at = quota.best(numbered)["at"][:most]
    return Candidates(found.places[at], found.beliefs[at], found.features[at], found.decided)


def in_turn(found: Candidates, wish: Wish, quota: Quota) -> tuple[np.ndarray, np.ndarray]:
    """(candidates in the order to ask, worth of each), the best of what is left each time."""
    beliefs, count = found.open_beliefs.astype(np.float64), len(found.places)
    vectors = centred(np.concatenate([found.features, found.decided]))
    vectors, before = vectors[:count], vectors[count:]
    novelty = 1 - np.maximum(0, (vectors @ before.T).max(axis=1)) if len(before) else np.ones(count)
    typical, expected = float(np.median(wish.positives)), wish.positives.astype(np.float64)
    order, worth, left = list[int](), list[float](), np.ones(count, bool)
    while len(order) < wish.budget:
        worths = beliefs @ need(expected, typical) if wish.by == "gain" else np.ones(count)
        values = np.where(left & (novelty >= LEAST_NOVELTY), worths * novelty, -1.0)
        at = int(values.argmax()) if count else 0
        if not count or values[at] < 0:
            break
        left[at] = False
        if not quota.take(found.places[at]):
            continue
        order.append(at)
        worth.append(float(values[at]))
        expected += beliefs[at]
        novelty = np.minimum(novelty, 1 - np.maximum(0, vectors @ vectors[at]))
    return np.array(order, np.int64), np.array(worth)


def _questions(found: Candidates, order: np.ndarray, values: np.ndarray, per_image: int) -> Questions:
    columns: list[list] = [[], [], [], [], []]
    for at, value in zip(order.tolist(), values.tolist(), strict=True):
        beliefs = found.beliefs[at]
        classes = np.argsort(-np.nan_to_num(beliefs, nan=-1.0), kind="stable")
        classes = classes[~np.isnan(beliefs[classes])][:per_image]
        place, many = found.places[at], len(classes)
        for column, part in zip(columns, ([int(place["shard"])] * many, [int(place["row"])] * many, classes.tolist(),
                                          beliefs[classes].tolist(), [value] * many), strict=True):
            column += part
    kinds = (np.int32, np.int32, np.int32, np.float32, np.float32)
    return Questions(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))
