"""Questions: which entries a person should decide next. A table for people, and a file that `lacuna explore` opens.

RUN/explore/questions-LABELS.json holds the latest selection; draws by lot also stay in lots-LABELS.jsonl, since a
promise of `lacuna suggest` can rest on them: a draw counts for a class once every question of it has an answer.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass

import numpy as np

from lacuna.basics import storage
from lacuna.data_pipelines.index import ShardIndex
from lacuna.tools.suggest.table import write_table

COLUMNS = ("key", "shard", "row", "class", "class_id", "name", "score", "value")
Entry = tuple[int, int, int]  # shard, row, class


@dataclass(frozen=True)
class Questions:
    """In the order in which they should be asked."""

    shards: np.ndarray
    rows: np.ndarray
    classes: np.ndarray
    scores: np.ndarray  # what the model believes
    values: np.ndarray  # what an answer is worth, by the score that chose it

    def __len__(self) -> int:
        return len(self.rows)

    def entries(self) -> list[Entry]:
        return list(zip(self.shards.tolist(), self.rows.tolist(), self.classes.tolist(), strict=True))


def save(questions: Questions, index: ShardIndex, out: str | None, home: str, labels: str, facts: dict) -> None:
    """`out`: the table (.csv or .parquet); `home`: the run's explore folder."""
    if out:
        write_table(out, as_table(questions, index))
    items = [{"shard": s, "row": r, "class": c, "score": score} for (s, r, c), score in zip(
        questions.entries(), questions.scores.tolist(), strict=True)]
    os.makedirs(home, exist_ok=True)
    storage.write_atomic(os.path.join(home, f"questions-{labels}.json"),
                         json.dumps({**facts, "questions": items}).encode())
    if facts["by"] == "lot":
        with open(os.path.join(home, f"lots-{labels}.jsonl"), "a", encoding="utf-8") as f:
            f.write(json.dumps(questions.entries()) + "\n")


def as_table(questions: Questions, index: ShardIndex) -> dict[str, list]:
    keys = [""] * len(questions)
    for shard in np.unique(questions.shards):
        names = index.members(int(shard)).keys
        for place in np.flatnonzero(questions.shards == shard):
            keys[place] = names[int(questions.rows[place])]
    ids = index.class_ids or [""] * len(index.classes)
    classes = questions.classes.tolist()
    columns = (keys, questions.shards.tolist(), questions.rows.tolist(), classes, [ids[c] for c in classes],
               [index.classes[c] for c in classes], questions.scores.tolist(), questions.values.tolist())
    return dict(zip(COLUMNS, columns, strict=True))


def read_questions(home: str, labels: str) -> list[dict]:
    """The latest selection for these labels; empty if there was none."""
    path = os.path.join(home, f"questions-{labels}.json")
    return json.loads(storage.read_bytes(path))["questions"] if os.path.exists(path) else []


def drawn_by_lot(home: str, answered: set[Entry]) -> set[Entry]:
    """Entries of draws that were answered to the last question of their class.

    Of several draws of a class the largest finished one counts: two draws together are none.
    """
    best: dict[int, set[Entry]] = {}
    for path in glob.glob(os.path.join(glob.escape(home), "lots-*.jsonl")):
        with open(path, encoding="utf-8") as f:
            for line in f:
                if not line.endswith("\n"):
                    continue  # a kill may have cut the last one
                by_class: dict[int, set[Entry]] = {}
                for shard, row, cls in json.loads(line):
                    by_class.setdefault(cls, set()).add((shard, row, cls))
                for cls, entries in by_class.items():
                    if entries <= answered and len(entries) > len(best.get(cls, ())):
                        best[cls] = entries
    return set().union(*best.values()) if best else set()
