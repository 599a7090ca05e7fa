"""The ways to choose entries: for the most gain, unlike each other, where the model is unsure, at random, by lot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lacuna.tools.passes.looking import unit
from lacuna.tools.select.candidates import PLACE, highest, vectors_of
from lacuna.tools.select.questions import Questions
from lacuna.tools.select.quota import Quota
from lacuna.tools.select.scores import share_out, spread, uncertainty
from lacuna.tools.suggest.evidence import Scored

WAYS = ("gain", "diverse", "uncertain", "random", "lot")
_SPARE = 4  # candidates of a class for each of its questions if all classes asked equally many
_LEAST = 200


@dataclass(frozen=True)
class Wish:
    """What was asked for on the command line."""

    by: str
    budget: int
    positives: np.ndarray  # [L] known ones of each class
    seed: int = 0
    top: int = 500  # lot: of a class, the highest beliefs among which is drawn
    per_image: int = 100  # whole images: at most so many classes of each


def choose(scored: Scored, wish: Wish, quota: Quota) -> Questions:
    """Entries of any image."""
    if wish.by in ("gain", "diverse"):
        return _spread(scored, wish, quota)
    if wish.by == "lot":
        return _by_lot(scored, wish)
    classes = scored.source.classes

    def draw(shard: int, beliefs: np.ndarray) -> np.ndarray:
        return np.random.default_rng([wish.seed, shard]).random((len(beliefs), classes), np.float32)

    value = draw if wish.by == "random" else lambda _, beliefs: uncertainty(beliefs)
    # With groups an entry's turn can come and its group be full: then others are needed in its place.
    found = highest(scored, value, wish.budget * (1 if quota.groups is None else _SPARE), quota)
    joined = np.concatenate(found)
    numbers = np.repeat(np.arange(classes), [len(part) for part in found])
    order = first_allowed(joined, np.argsort(-joined["value"], kind="stable"), wish.budget, quota)
    return _questions(joined[order], numbers[order])


def first_allowed(places: np.ndarray, order: np.ndarray, budget: int, quota: Quota) -> np.ndarray:
    """Of an order of places, the first that their groups allow."""
    chosen = list[int]()
    for at in order.tolist():
        if len(chosen) == budget:
            break
        if quota.take(places[at]):
            chosen.append(at)
    return np.array(chosen, np.int64)


def _spread(scored: Scored, wish: Wish, quota: Quota) -> Questions:
    """gain: belief × novelty × need; diverse: novelty × need, that is farthest first (k-centre) within every class."""
    classes = scored.source.classes
    most = max(_LEAST, _SPARE * -(-wish.budget // classes))
    found = highest(scored, lambda _, beliefs: beliefs, most, quota)
    orders, worths, beliefs = [], [], []
    for places, vectors in zip(found, vectors_of(scored, found), strict=True):
        believed = places["belief"].astype(np.float64)
        order, worth = spread(believed if wish.by == "gain" else np.ones_like(believed), centred(vectors), most)
        orders.append(order)
        worths.append(worth)
        beliefs.append(believed[order])
    chosen = share_out(worths, beliefs, wish.positives, wish.budget,
                       lambda cls, place: quota.take(found[cls][orders[cls][place]]))
    picked = np.array([found[cls][orders[cls][place]] for cls, place in chosen], PLACE)
    picked["value"] = [worths[cls][place] for cls, place in chosen]
    return _questions(picked, np.array([cls for cls, _ in chosen], np.int64))


def centred(vectors: np.ndarray) -> np.ndarray:
    """What is left of the candidates' features without their mean, of length 1: most features share a large part."""
    return unit(vectors - vectors.mean(axis=0)) if len(vectors) else vectors


def _by_lot(scored: Scored, wish: Wish) -> Questions:
    """Of every class equally many, drawn among its `top` highest beliefs; asked from the surest down."""
    found = highest(scored, lambda _, beliefs: beliefs, wish.top, Quota())
    each = wish.budget // scored.source.classes
    rng = np.random.default_rng(wish.seed)
    drawn = [np.sort(rng.permutation(len(places))[:each]) for places in found]
    picked = np.concatenate([places[at] for places, at in zip(found, drawn, strict=True)])
    return _questions(picked, np.repeat(np.arange(len(found)), [len(at) for at in drawn]))


def _questions(places: np.ndarray, classes: np.ndarray) -> Questions:
    return Questions(places["shard"], places["row"], classes.astype(np.int32), places["belief"], places["value"])
