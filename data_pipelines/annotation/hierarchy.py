"""Annotation that stops part-way down a hierarchy of classes (Soft Exposure's knowledge-graph protocol).

An annotator verifies general concepts first and goes down into those that are present. Each true path, from a root to
a deepest positive class, stops at a random node: root … node are verified positive, everything below the node is
unknown, all other labels stay. A class that another path verified stays positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.flag_text import flag_lines
from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.annotation.labelled_rows import Chunk, LabelledRows
from lacuna.data_pipelines.annotation.schemes import Draw
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN

_GRAPH = 21


@dataclass(frozen=True)
class GraphTruncation:
    """Every true path of a class tree is annotated down to a random node."""

    summary: ClassVar[str] = "every true path of a class tree down to a random node (Soft Exposure)"
    seed: int = 0
    parents: str = ""

    def prepare(self, rows: LabelledRows) -> Draw:
        if not self.parents:
            raise UserError("--parents: name a file with one `child<TAB>parent` line a class that has a parent.")
        tree = ClassTree.load(self.parents, rows.index)
        seed = mix(self.seed, _GRAPH)

        def draw(chunk: Chunk) -> np.ndarray:
            out = chunk.targets.copy()
            row, cls = chunk.entries(POSITIVE)
            picks = uniform_array(seed, chunk.positions[row] * rows.classes + cls)
            starts = np.searchsorted(row, np.arange(len(out) + 1))
            for r in range(len(out)):
                mine = slice(starts[r], starts[r + 1])
                tree.truncate(out[r], cls[mine].tolist(), picks[mine])
            return out

        return draw


class ClassTree:
    """Classes 0..L-1, and inner nodes that are no classes (numbered from L on), each with at most one parent."""

    def __init__(self, parent: dict[int, int], classes: int):
        self.classes = classes
        self.paths = [_path_to(c, parent) for c in range(classes)]  # root … class
        below: dict[int, list[int]] = {}
        for c, path in enumerate(self.paths):
            for node in path[:-1]:
                below.setdefault(node, []).append(c)
        self.below = {node: np.array(found) for node, found in below.items()}  # classes strictly below a node

    def truncate(self, labels: np.ndarray, positives: list[int], picks: np.ndarray) -> None:
        """Change one row's labels int8 [L] in place; picks: a uniform number for each of its positives."""
        inner = {node for c in positives for node in self.paths[c][:-1]}
        verified: list[int] = []
        for c, pick in zip(positives, picks, strict=True):
            if c in inner:
                continue  # a deeper class is present: this one lies on its path
            path = self.paths[c]
            stop = int(pick * len(path))
            verified += path[: stop + 1]
            if path[stop] in self.below:
                labels[self.below[path[stop]]] = UNKNOWN
        labels[[node for node in verified if node < self.classes]] = POSITIVE

    @classmethod
    def load(cls, url: str, index: ShardIndex) -> ClassTree:
        """Read `child<TAB or comma>parent` lines; nodes are class names or stable ids, others become inner nodes."""
        lines = flag_lines("--parents", url, "Give one `child<TAB>parent` line a class.")
        numbers = {name: c for names in (index.classes, index.class_ids) for c, name in enumerate(names)}
        known = len(numbers)
        parent: dict[int, int] = {}
        matched = 0
        for at, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith("#"):
                continue
            names = [n.strip() for n in line.split("\t" if "\t" in line else ",")]
            if len(names) != 2 or not all(names) or names[0] == names[1]:
                raise UserError(f"{url}, line {at}: {line!r} is not `child<TAB>parent` with two different names.")
            matched += names[0] in numbers and numbers[names[0]] < len(index.classes)
            child, above = (numbers.setdefault(n, len(index.classes) + len(numbers) - known) for n in names)
            if parent.setdefault(child, above) != above:
                raise UserError(f"{url}, line {at}: {names[0]!r} already has another parent. A class may have one: "
                                "keep the one whose path the annotation should follow.")
        if not matched:
            raise UserError(f"{url}: none of its children is a class of {index.url} (for example "
                            f"{index.classes[:3]}). Use its class names or stable ids.")
        return cls(parent, len(index.classes))


def _path_to(node: int, parent: dict[int, int]) -> list[int]:
    path = [node]
    while path[-1] in parent:
        path.append(parent[path[-1]])
        if len(path) > len(parent) + 1:
            raise UserError(f"--parents: going up from class id {node} never ends, its parents form a circle. "
                            "Remove one of their lines.")
    return path[::-1]
