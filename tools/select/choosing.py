"""The ways to choose questions: for the most gain, where the model is unsure, at random, or by lot for a promise."""

from __future__ import annotations

import numpy as np

from lacuna.tools.passes.looking import unit
from lacuna.tools.select.candidates import PLACE, highest, vectors_of
from lacuna.tools.select.questions import Questions
from lacuna.tools.select.scores import share_out, spread, uncertainty
from lacuna.tools.suggest.evidence import Scored

WAYS = ("gain", "uncertain", "random", "lot")
_SPARE = 4  # candidates of a class for each of its questions if all classes asked equally many
_LEAST = 200


def choose(scored: Scored, by: str, budget: int, positives: np.ndarray, seed: int, top: int) -> Questions:
    """`positives` [L]: known ones of each class; `top`: of a class, the highest beliefs among which a lot is drawn."""
    if by == "gain":
        return _by_gain(scored, budget, positives)
    if by == "lot":
        return _by_lot(scored, budget, seed, top)
    classes = scored.source.classes

    def draw(shard: int, beliefs: np.ndarray) -> np.ndarray:
        return np.random.default_rng([seed, shard]).random((len(beliefs), classes), np.float32)

    found = highest(scored, draw if by == "random" else lambda _, beliefs: uncertainty(beliefs), budget)
    joined = np.concatenate(found)
    numbers = np.repeat(np.arange(classes), [len(part) for part in found])
    order = np.argsort(-joined["value"], kind="stable")[:budget]
    return _questions(joined[order], numbers[order])


def _by_gain(scored: Scored, budget: int, positives: np.ndarray) -> Questions:
    classes = scored.source.classes
    most = max(_LEAST, _SPARE * -(-budget // classes))
    found = highest(scored, lambda _, beliefs: beliefs, most)
    orders, worths, beliefs = [], [], []
    for places, vectors in zip(found, vectors_of(scored, found), strict=True):
        order, worth = spread(places["belief"].astype(np.float64), centred(vectors), most)
        orders.append(order)
        worths.append(worth)
        beliefs.append(places["belief"][order].astype(np.float64))
    chosen = share_out(worths, beliefs, positives, budget)
    picked = np.array([found[cls][orders[cls][place]] for cls, place in chosen], PLACE)
    picked["value"] = [worths[cls][place] for cls, place in chosen]
    return _questions(picked, np.array([cls for cls, _ in chosen], np.int64))


def centred(vectors: np.ndarray) -> np.ndarray:
    """What is left of the candidates' features without their mean, of length 1: most features share a large part."""
    return unit(vectors - vectors.mean(axis=0)) if len(vectors) else vectors


def _by_lot(scored: Scored, budget: int, seed: int, top: int) -> Questions:
    """Of every class equally many, drawn among its `top` highest beliefs; asked from the surest down."""
    found = highest(scored, lambda _, beliefs: beliefs, top)
    each = budget // scored.source.classes
    rng = np.random.default_rng(seed)
    drawn = [np.sort(rng.permutation(len(places))[:each]) for places in found]
    picked = np.concatenate([places[at] for places, at in zip(found, drawn, strict=True)])
    return _questions(picked, np.repeat(np.arange(len(found)), [len(at) for at in drawn]))


def _questions(places: np.ndarray, classes: np.ndarray) -> Questions:
    return Questions(places["shard"], places["row"], classes.astype(np.int32), places["belief"], places["value"])
