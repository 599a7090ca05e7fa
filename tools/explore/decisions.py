"""What a person decided about suggested labels: appended line by line, replayed at the next start."""

from __future__ import annotations

import json
import os
import threading
import time

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.tools.suggest.table import check_format, write_sidecar, write_table

ACCEPT, REJECT, UNDO = "accept", "reject", "undo"
Entry = tuple[int, int, int]  # shard, row, class


class Decisions:
    """Thread-safe; every decision is on disk before it is answered."""

    def __init__(self, path: str, sidecar: Sidecar):
        self.path, self.sidecar = path, sidecar
        self.made: dict[Entry, str] = {}
        self._lock = threading.Lock()
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                for line in f:
                    if line.endswith("\n"):  # a kill may have cut the last one
                        body = json.loads(line)
                        self._apply((body["shard"], body["row"], body["class"]), body["decision"])

    def decide(self, entry: Entry, decision: str) -> None:
        shard, row, cls = entry
        index = self.sidecar.index
        if decision not in (ACCEPT, REJECT, UNDO):
            raise UserError(f"decision {decision!r}: legal are {ACCEPT}, {REJECT}, {UNDO}.")
        if not (0 <= shard < len(index.shards) and 0 <= row < index.shards[shard].rows
                and 0 <= cls < len(index.classes)):
            raise UserError(f"no such entry: shard {shard}, row {row}, class {cls}.")
        line = json.dumps({"shard": shard, "row": row, "class": cls, "decision": decision, "time": time.time()})
        with self._lock:
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(line + "\n")
                f.flush()
                os.fsync(f.fileno())
            self._apply(entry, decision)

    def _apply(self, entry: Entry, decision: str) -> None:
        if decision == UNDO:
            self.made.pop(entry, None)
        else:
            self.made[entry] = decision

    def counts(self) -> dict[str, int]:
        values = list(self.made.values())
        return {word: values.count(word) for word in (ACCEPT, REJECT)}

    def save_table(self, url: str) -> int:
        """CSV or Parquet with a row a decision; returns how many."""
        check_format(url, "export")
        index, entries = self.sidecar.index, sorted(self.made)
        keys: dict[int, list[str]] = {}
        columns: dict[str, list] = {name: [] for name in ("key", "shard", "row", "class", "name", "decision")}
        for shard, row, cls in entries:
            if shard not in keys:
                keys = {shard: index.members(shard).keys}  # entries are sorted: one shard's keys at a time
            for name, value in zip(columns, (keys[shard][row], shard, row, cls, index.classes[cls],
                                             self.made[shard, row, cls]), strict=True):
                columns[name].append(value)
        write_table(url, columns)
        return len(entries)

    def save_sidecar(self, name: str) -> int:
        """The run's labels with accepted entries positive and rejected ones negative."""
        entries = {entry: POSITIVE if word == ACCEPT else NEGATIVE for entry, word in self.made.items()}
        write_sidecar(self.sidecar, name, entries, {"by": "lacuna explore", **self.counts()})
        return len(entries)
