"""Gathers what promises are made from: scores of unknown entries, of validation negatives, and decisions of people.

Legend: n samples of a shard, L classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.eval.pieces import from_parts
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.scoring import shard_rows
from lacuna.tools.passes.tables import TableParts
from lacuna.tools.run_files import output_folder
from lacuna.tools.suggest.promise import Answers, Evidence

_KEPT = 50_000_000  # scores in memory, of all classes together
_LEAST_KEPT = 1000  # of a class
Decided = dict[tuple[int, int, int], bool]  # shard, row, class → it is positive


class Highest:
    """The highest scores of every column, falling, of however many rows are offered."""

    def __init__(self, columns: int):
        self.most = max(_LEAST_KEPT, _KEPT // max(1, columns))
        self.kept: list[list[np.ndarray]] = [[] for _ in range(columns)]
        self.offered = np.zeros(columns, np.int64)

    def offer(self, scores: np.ndarray, taken: np.ndarray) -> None:
        """Of scores [n, columns], those that are `taken`."""
        for column, parts in enumerate(self.kept):
            parts.append(scores[taken[:, column], column].astype(np.float32))
            self.offered[column] += len(parts[-1])
            if sum(map(len, parts)) > 2 * self.most:
                self.kept[column] = [self.falling(column)]

    def falling(self, column: int) -> np.ndarray:
        parts = self.kept[column]
        return -np.sort(-np.concatenate(parts))[: self.most] if parts else np.zeros(0, np.float32)


@dataclass(frozen=True)
class Scored:
    """The training set's part files beside its labels; decided entries are no longer unknown to `open_entries`."""

    parts: Parts | TableParts
    source: ShardSource
    decided: Decided

    def shards(self) -> Iterator[tuple[int, dict[str, np.ndarray], np.ndarray]]:
        """(shard, part, labels [n, L])."""
        for shard, part in self.parts.read_all(list(shard_rows(self.source))):
            yield shard, part, self.source.sidecar.labels(shard).dense(self.source.classes, part["rows"])

    def open_entries(self, shard: int, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """bool [n, L]: entries that neither the sidecar nor a person has decided."""
        unknown = labels == UNKNOWN
        place = {int(row): i for i, row in enumerate(rows)}
        for row, cls in self.decided_in(shard):
            if row in place:
                unknown[place[row], cls] = False
        return unknown

    def decided_in(self, shard: int) -> list[tuple[int, int]]:
        """(row, class) of the shard's decided entries."""
        return self._by_shard.get(shard, [])

    @cached_property
    def _by_shard(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for shard, row, cls in self.decided:
            found.setdefault(shard, []).append((row, cls))
        return found


def val_scores(parts: Parts | TableParts, val: ShardSource, most_bad: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels [samples, L] of the validation set."""
    pieces = list(from_parts(parts, val, most_bad))
    if not pieces:
        raise UserError(f"{val.index.url}: no sample could be read.")
    return (np.concatenate([piece.scores for piece in pieces]), np.concatenate([piece.targets for piece in pieces]))


def class_evidence(scored: Scored, val: tuple[np.ndarray, np.ndarray] | None, lots: set[tuple[int, int, int]]
                   ) -> list[Evidence]:
    """Of every class. Decided entries stay among the unknown ones: they are counted as what they turned out to be."""
    classes = scored.source.classes
    highest, answers = Highest(classes), [list[tuple[float, bool, bool]]() for _ in range(classes)]
    for shard, part, labels in scored.shards():
        highest.offer(part["scores"], labels == UNKNOWN)
        place = {int(row): i for i, row in enumerate(part["rows"])}
        for row, cls in scored.decided_in(shard):
            if row in place and labels[place[row], cls] == UNKNOWN:
                entry = (shard, row, cls)
                answers[cls].append((float(part["scores"][place[row], cls]), scored.decided[entry], entry in lots))
    found = []
    for cls in range(classes):
        negatives = None if val is None else val[0][val[1][:, cls] == NEGATIVE, cls]
        found.append(Evidence(highest.falling(cls), int(highest.offered[cls]), negatives, _answers(answers[cls])))
    return found


def _answers(triples: Iterable[tuple[float, bool, bool]]) -> Answers:
    rows = list(triples)
    return Answers(np.array([r[0] for r in rows], np.float32), np.array([r[1] for r in rows], bool),
                   np.array([r[2] for r in rows], bool))


def pool_evidence(scored: Scored, val: tuple[np.ndarray, np.ndarray], classes: np.ndarray) -> Evidence:
    """Of classes that are too small alone, by images: of an image only the surest undecided entry would be suggested.

    One entry per image keeps the counts exact: what an image's classes have in common cannot count twice.
    """
    highest = Highest(1)
    for shard, part, labels in scored.shards():
        best, there = surest(part["scores"], scored.open_entries(shard, part["rows"], labels), classes)
        highest.offer(part["scores"][np.arange(len(best)), best][:, None], there[:, None])
    scores = np.where(val[1][:, classes] == NEGATIVE, val[0][:, classes], -np.inf).max(axis=1)
    return replace(Evidence(highest.falling(0), int(highest.offered[0]), scores), pool=True)


def surest(scores: np.ndarray, unknown: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(class of the highest unknown score of every row among `classes`, whether it has one) [n] each."""
    open_scores = np.where(unknown[:, classes], scores[:, classes], -np.inf)
    return classes[open_scores.argmax(axis=1)], np.isfinite(open_scores.max(axis=1))


def decisions_of(run: str, sidecar: Sidecar) -> tuple[Decided, set[tuple[int, int, int]]]:
    """(what people decided in `lacuna explore` about these labels, which of it was drawn by lot)."""
    from lacuna.tools.explore.decisions import ACCEPT, Decisions
    from lacuna.tools.select.questions import drawn_by_lot

    home = os.path.join(output_folder(run), "explore")
    made = Decisions(os.path.join(home, f"decisions-{sidecar.name}.jsonl"), sidecar).made
    return {entry: word == ACCEPT for entry, word in made.items()}, drawn_by_lot(home, set(made))
