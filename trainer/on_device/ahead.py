"""The next batch's rows, gathered into buffers that copy without waiting, by a thread while this batch is computed.

A sample comes once an epoch, so nobody changes its row between. Shards that the next batch opens are not leased yet:
such a batch is gathered when it comes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future

import numpy as np
import torch

from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.rows import Rows
from lacuna.state_store.session import Session
from lacuna.trainer.on_device.uploads import host_buffer

Gathered = dict[str, torch.Tensor]  # field → stored numbers [B, …] on the host


class RowsAhead:
    def __init__(self, session: Session, source: ShardSource, device: torch.device, threads: Executor):
        self.session, self.source, self.device, self.threads = session, source, device, threads
        self.fields: set[str] = set()  # that the last step read
        self.planned: Iterator[tuple[np.ndarray, np.ndarray]] = iter(())
        self.coming: tuple[Rows, Future[Gathered]] | None = None
        self.hits = 0

    def begin_epoch(self, planned: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
        """`planned`: (shards, places among the rows that take part) of every step to come."""
        self.planned, self.coming = planned, None
        next(planned, None)  # the first batch comes at once

    def take(self, rows: Rows) -> Gathered:
        """What is there of this batch; nothing if it is not the one that was planned (corrupt samples are left out)."""
        coming, self.coming = self.coming, None
        if coming is None or not (np.array_equal(coming[0].shards, rows.shards)
                                  and np.array_equal(coming[0].rows, rows.rows)):
            return {}
        self.hits += 1
        return coming[1].result()

    def start(self) -> None:
        """With the batch after this one, if all its shards are leased."""
        planned = next(self.planned, None)
        if planned is None or not self.fields or (self.session.slots.slot_of[planned[0]] < 0).any():
            return
        rows = self.session.at(planned[0], self._rows(*planned))
        self.coming = rows, self.threads.submit(self._gather, rows, sorted(self.fields))

    def _rows(self, shards: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Positions in the tar."""
        if self.source.subset is None:
            return places
        rows = np.empty_like(places)
        for shard in np.unique(shards):
            rows[shards == shard] = np.flatnonzero(self.source.subset.mask(int(shard)))[places[shards == shard]]
        return rows

    def _gather(self, rows: Rows, fields: list[str]) -> Gathered:
        return {field: gathered(rows, field, self.device) for field in fields}


def gathered(rows: Rows, field: str, device: torch.device) -> torch.Tensor:
    """Stored numbers of a field (uint16 as int16 with the same bits)."""
    spec = rows.field(field)
    tensor, array = host_buffer((len(rows.rows), *spec.stored_shape), spec.stored_dtype, device)
    rows.gather(field, out=array)
    return tensor
