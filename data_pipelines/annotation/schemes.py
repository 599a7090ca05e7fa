"""The published ways to take labels away: what stays known of every row, as a function of a seed.

A scheme is a frozen dataclass of its options; `prepare(rows)` makes whatever draw needs the whole dataset and returns
the function that turns a chunk's true labels int8 [n, L] into the labels that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.annotation.labelled_rows import Chunk, LabelledRows, cut_off
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels

Draw = Callable[[Chunk], np.ndarray]
# Keeps the uses of one seed apart.
_RANDOM, _FIXED, _POSITIVE, _NEGATIVE, _RATIO = 11, 12, 13, 14, 15
_ALL = -1  # num_pos / num_neg: keep all
_LARGEST = np.uint64((1 << 64) - 1)
_BUFFERED_ENTRIES = 4_000_000


@dataclass(frozen=True)
class SinglePositive:
    """Cole et al.'s generator, bit for bit: one RandomState, images in their original order, for each a shuffle of its
    positives and then one of its negatives (also when none is kept: it moves the stream on)."""

    summary: ClassVar[str] = "num_pos random positives (and num_neg negatives) of every image (Cole et al. 2021)"
    seed: int = 1200
    num_pos: int = 1
    num_neg: int = 0

    def prepare(self, rows: LabelledRows) -> Draw:
        for flag, value in (("--num-pos", self.num_pos), ("--num-neg", self.num_neg)):
            if value < _ALL:
                raise UserError(f"{flag} {value}: give a number ≥ 0, or {_ALL} to keep all.")
        truth, order = rows.gather(), rows.order
        pos_count = np.diff(truth.pos_ptr)[order]
        neg_count = rows.classes - pos_count if truth.unlisted == NEGATIVE else np.diff(truth.neg_ptr)[order]
        positives, negatives = _Kept(pos_count, self.num_pos), _Kept(neg_count, self.num_neg)
        rng = np.random.RandomState(self.seed)
        classes = np.arange(rows.classes)
        for place, row in enumerate(order.tolist()):
            pos = truth.positives(row).copy()
            neg = np.delete(classes, pos) if truth.unlisted == NEGATIVE else truth.negatives(row).copy()
            rng.shuffle(pos)
            rng.shuffle(neg)
            positives.put(place, pos)
            negatives.put(place, neg)
        drawn = SparseLabels(positives.ptr, positives.ids, negatives.ptr, negatives.ids)
        place_of = np.zeros(int(rows.first_ids[-1]), np.int64)  # of a row id in the original order
        place_of[order] = np.arange(len(order))

        def draw(chunk: Chunk) -> np.ndarray:
            out = drawn.dense(rows.classes, place_of[chunk.ids])
            for count, value in ((self.num_pos, POSITIVE), (self.num_neg, NEGATIVE)):
                if count == _ALL:
                    out[chunk.targets == value] = value
            return out

        return draw


@dataclass(frozen=True)
class RandomPerAnnotation:
    """Every annotation is dropped with the same probability: class frequencies survive."""

    summary: ClassVar[str] = "every annotation becomes unknown with probability p (RPA; Ben-Baruch et al. 2022)"
    seed: int = 0
    p: float = 0.5

    def prepare(self, rows: LabelledRows) -> Draw:
        _check_share("--p", self.p)
        seed = mix(self.seed, _RANDOM)

        def draw(chunk: Chunk) -> np.ndarray:
            out = chunk.targets.copy()
            known = np.flatnonzero(out.reshape(-1) != UNKNOWN)
            row, cls = np.divmod(known, rows.classes)
            codes = chunk.positions[row] * rows.classes + cls
            out.reshape(-1)[known[uniform_array(seed, codes) < self.p]] = UNKNOWN
            return out

        return draw


@dataclass(frozen=True)
class FixedPerClass:
    """The same number of positives, and of negatives, of every class: class frequencies vanish."""

    summary: ClassVar[str] = "per_class positives and as many negatives of every class (FPC; Ben-Baruch et al. 2022)"
    seed: int = 0
    per_class: int = 1000

    def prepare(self, rows: LabelledRows) -> Draw:
        if self.per_class < 1:
            raise UserError(f"--per-class {self.per_class}: give a number ≥ 1.")
        seeds = {value: mix(self.seed, _FIXED, value) for value in (POSITIVE, NEGATIVE)}
        smallest = {value: _SmallestPerClass(rows.classes, self.per_class) for value in seeds}
        for chunk in rows.all_chunks():
            for value, keeper in smallest.items():
                row, cls = chunk.entries(value)
                keeper.add(cls, chunk.hashes(seeds[value], row, cls))
        cuts = {value: keeper.finish() for value, keeper in smallest.items()}

        def draw(chunk: Chunk) -> np.ndarray:
            out = np.full_like(chunk.targets, UNKNOWN)
            for value, cut in cuts.items():
                row, cls = chunk.entries(value)
                kept = chunk.hashes(seeds[value], row, cls) <= cut[cls]
                out[row[kept], cls[kept]] = value
            return out

        return draw


@dataclass(frozen=True)
class ImageFraction:
    """Cole et al.'s subsample of images in their original order, bit for bit; the images left out know nothing."""

    summary: ClassVar[str] = "all labels of a random fraction of the images (Cole et al. 2021, figure 1)"
    seed: int = 999
    fraction: float = 0.1

    def chosen(self, rows: LabelledRows) -> np.ndarray:
        """Ids of the kept rows, in the original order."""
        _check_share("--fraction", self.fraction)
        count = int(np.round(self.fraction * len(rows.order)))
        return rows.order[np.sort(np.random.RandomState(self.seed).permutation(len(rows.order))[:count])]

    def prepare(self, rows: LabelledRows) -> Draw:
        flags = np.zeros(int(rows.first_ids[-1]), bool)
        flags[self.chosen(rows)] = True
        return lambda chunk: np.where(flags[chunk.ids, None], chunk.targets, np.int8(UNKNOWN))


@dataclass(frozen=True)
class PositiveFraction:
    """Soft Exposure's COCO subsets: exactly a fraction of all positives, and u times as many negatives, u in 1..1.5.

    The paper does not say over what u is drawn. `image`: for every image, whose negatives follow its own positives, so
    an image without positives has no annotation. `dataset`: once, and negatives are drawn from all images.
    """

    summary: ClassVar[str] = "a fraction of all positives and 1-1.5 times as many negatives (Soft Exposure)"
    seed: int = 0
    fraction: float = 0.1
    negatives: str = "image"

    def prepare(self, rows: LabelledRows) -> Draw:
        _check_share("--fraction", self.fraction)
        if self.negatives not in ("image", "dataset"):
            raise UserError(f"--negatives {self.negatives!r}: legal are 'image' and 'dataset'.")
        seeds = {value: mix(self.seed, tag) for value, tag in ((POSITIVE, _POSITIVE), (NEGATIVE, _NEGATIVE))}

        def hashes(value: int) -> Iterator[np.ndarray]:
            for chunk in rows.all_chunks():
                yield chunk.hashes(seeds[value], *chunk.entries(value))

        cut, kept = cut_off(lambda: hashes(POSITIVE), lambda total: round(self.fraction * total))
        negative_cut = np.uint64(0)
        if self.negatives == "dataset":
            ratio = _ratio(mix(self.seed, _RATIO), np.zeros(1, np.int64))[0]
            negative_cut, _ = cut_off(lambda: hashes(NEGATIVE), lambda total: min(total, round(ratio * kept)))

        def draw(chunk: Chunk) -> np.ndarray:
            out = np.full_like(chunk.targets, UNKNOWN)
            row, cls = chunk.entries(POSITIVE)
            near = chunk.hashes(seeds[POSITIVE], row, cls) < cut
            out[row[near], cls[near]] = POSITIVE
            row, cls = chunk.entries(NEGATIVE)
            if self.negatives == "dataset":
                near = chunk.hashes(seeds[NEGATIVE], row, cls) < negative_cut
            else:
                ratios = _ratio(mix(self.seed, _RATIO), chunk.positions)
                quota = np.rint(ratios * (out == POSITIVE).sum(axis=1)).astype(np.int64)
                wanted = quota[row] > 0  # few rows, when few positives are kept
                row, cls = row[wanted], cls[wanted]
                near = _first_per_row(row, chunk.hashes(seeds[NEGATIVE], row, cls), quota)
            out[row[near], cls[near]] = NEGATIVE
            return out

        return draw


class _Kept:
    """The first `most` ids of every row's shuffled list, packed."""

    def __init__(self, counts: np.ndarray, most: int):
        self.ptr = np.concatenate([[0], np.cumsum(np.minimum(counts, max(0, most)))])
        self.ids = np.zeros(int(self.ptr[-1]), np.int32)

    def put(self, place: int, shuffled: np.ndarray) -> None:
        start, end = self.ptr[place], self.ptr[place + 1]
        self.ids[start:end] = np.sort(shuffled[: end - start])


class _SmallestPerClass:
    """Collects (class, hash) pairs and keeps the k smallest hashes of every class, in bounded memory."""

    def __init__(self, classes: int, k: int):
        self.k = k
        self.cut = np.full(classes, _LARGEST)  # uint64 [L]: hashes above it cannot be among the k smallest
        self._classes: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._buffered = 0

    def add(self, classes: np.ndarray, hashes: np.ndarray) -> None:
        near = hashes <= self.cut[classes]
        self._classes.append(classes[near].astype(np.int32))
        self._hashes.append(hashes[near])
        self._buffered += int(near.sum())
        if self._buffered > _BUFFERED_ENTRIES:
            self._compact()

    def finish(self) -> np.ndarray:
        self._compact()
        return self.cut

    def _compact(self) -> None:
        if not self._classes:
            return
        classes, hashes = np.concatenate(self._classes), np.concatenate(self._hashes)
        order = np.lexsort((hashes, classes))
        classes, hashes = classes[order], hashes[order]
        place = np.arange(len(classes)) - np.searchsorted(classes, classes, side="left")
        last = place == self.k - 1
        self.cut[classes[last]] = hashes[last]
        near = place < self.k
        self._classes, self._hashes = [classes[near]], [hashes[near]]
        # What must stay does not count: else a large k × L would be sorted again at every chunk.
        self._buffered = 0


def _first_per_row(row: np.ndarray, draws: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """bool: whether an entry has one of its row's `quota` smallest draws."""
    order = np.lexsort((draws, row))
    place = np.arange(len(order)) - np.searchsorted(row[order], row[order], side="left")
    out = np.zeros(len(row), bool)
    out[order[place < quota[row[order]]]] = True
    return out


def _ratio(seed: int, positions: np.ndarray) -> np.ndarray:
    """float64 in [1, 1.5)"""
    return 1.0 + 0.5 * uniform_array(seed, positions)


def _check_share(flag: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"{flag} {value}: give a number from 0 to 1.")
