"""A score table of any model (`lacuna scores`, `lacuna import-scores`), read like the part files of a scoring pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.scoring import pack_bad
from lacuna.trainer.methods.score_table import ImportedScores


@dataclass(frozen=True)
class TableParts:
    url: str
    source: ShardSource
    flag: str
    """Which flag has named the table, for messages."""

    @cached_property
    def table(self) -> ImportedScores:
        index = self.source.index
        return ImportedScores(self.url, index.fingerprint, ("scores",), self.flag, index.url)

    def read(self, shard: int) -> dict[str, np.ndarray]:
        """`scores` float32 [n, L] and `rows` of the rows that take part; none is `bad`: nothing is decoded."""
        rows = self.source.used(shard)
        scores = self.table.reader.read_shard("scores", shard)[rows].astype(np.float32)
        return {"scores": scores, "rows": rows, "bad": pack_bad([])}

    def read_all(self, shards: list[int]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        for shard in sorted(shards):
            yield shard, self.read(shard)
