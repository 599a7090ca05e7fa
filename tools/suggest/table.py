"""Suggested labels: which entries to look at, the table that people get, and the sidecar that training reads back.

Legend: n samples of a shard, L classes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex, Sidecar, SidecarWriter, sidecar_names
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, SparseLabels

COLUMNS = ("key", "shard", "row", "class", "class_id", "name", "score", "precision", "promise")
FORMATS = (".csv", ".parquet")


@dataclass
class Suggestions:
    """Entries (shard, row, class) with the score that speaks for them."""

    index: ShardIndex
    shards: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    classes: list[np.ndarray] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)

    def add(self, shard: int, rows: np.ndarray, scores: np.ndarray, chosen: np.ndarray) -> None:
        """Take the chosen entries (bool [n, L]) of a shard's rows."""
        place, cls = np.nonzero(chosen)
        self.shards.append(np.full(len(place), shard, np.int32))
        self.rows.append(rows[place].astype(np.int32))
        self.classes.append(cls.astype(np.int32))
        self.scores.append(scores[place, cls].astype(np.float32))

    def __len__(self) -> int:
        return sum(len(part) for part in self.rows)

    def sorted(self) -> dict[str, np.ndarray]:
        """Columns by class, the surest first."""
        joined = {name: np.concatenate(parts) if parts else np.zeros(0, np.int32) for name, parts in (
            ("shard", self.shards), ("row", self.rows), ("class", self.classes), ("score", self.scores))}
        order = np.lexsort((joined["row"], joined["shard"], -joined["score"], joined["class"]))
        return {name: values[order] for name, values in joined.items()}


def table(index: ShardIndex, columns: dict[str, np.ndarray],
          precision: Callable[[np.ndarray, np.ndarray], np.ndarray], pooled: np.ndarray) -> dict[str, list]:
    """What people get: `precision(classes, scores)` estimates it; `pooled` [L] says whose promise is a pool's."""
    keys: list[str] = [""] * len(columns["row"])
    for shard in np.unique(columns["shard"]):
        names = index.members(int(shard)).keys
        for place in np.flatnonzero(columns["shard"] == shard):
            keys[place] = names[int(columns["row"][place])]
    ids = index.class_ids or [""] * len(index.classes)
    classes = columns["class"].tolist()
    return {"key": keys, "shard": columns["shard"].tolist(), "row": columns["row"].tolist(), "class": classes,
            "class_id": [ids[c] for c in classes], "name": [index.classes[c] for c in classes],
            "score": columns["score"].tolist(),
            "precision": precision(columns["class"], columns["score"]).round(4).tolist(),
            "promise": ["pool" if pooled[c] else "class" for c in classes]}


def write_table(url: str, columns: dict[str, list]) -> None:
    """CSV or Parquet, by the file's ending."""
    if url.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer)
        storage.write_atomic(url, buffer.getvalue())
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    storage.write_atomic(url, text.getvalue().encode())


def check_format(url: str, option: str) -> None:
    if not url.endswith(FORMATS):
        raise UserError(f"{option} {url}: the ending says the format; legal: {', '.join(FORMATS)}.")


def write_sidecar(base: Sidecar, name: str, entries: dict[tuple[int, int, int], int], source: dict,
                  overwrite: bool = False) -> Sidecar:
    """A new sidecar: the labels of `base` with (shard, row, class) → POSITIVE or NEGATIVE laid over them."""
    if name == base.name or (name in sidecar_names(base.index) and not overwrite):
        raise UserError(f"sidecar {name!r}: there is one already. Choose another name.")
    assert set(entries.values()) <= {POSITIVE, NEGATIVE}
    by_shard: dict[int, list[tuple[int, int, int]]] = {}
    for (shard, row, cls), value in entries.items():
        by_shard.setdefault(shard, []).append((row, cls, value))
    writer = SidecarWriter(base.index, name, base.unlisted, {**source, "from": base.name})
    for shard in range(len(base.index.shards)):
        labels = base.labels(shard)
        if shard in by_shard:
            dense = labels.dense(len(base.index.classes))
            for row, cls, value in by_shard[shard]:
                dense[row, cls] = value
            labels = SparseLabels.from_dense(dense, base.unlisted)
        writer.write(shard, labels)
    return writer.close()
