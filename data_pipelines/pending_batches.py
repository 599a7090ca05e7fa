"""Batches whose samples are being made, by the threads of a stream.

Legend: n samples, L classes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import numpy as np
import torch

from lacuna.data_pipelines.augment import FULL_BOX
from lacuna.data_pipelines.batch import BadSample, Batch
from lacuna.data_pipelines.decode import DecodeError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import OpenShard, ShardSource


class PendingBatches:
    """Of one step, or of several that follow each other: a small batch of vectors costs less than handing it over."""

    def __init__(self, source: ShardSource, maker: SampleMaker, steps: list[tuple[np.ndarray, np.ndarray]],
                 opened: dict[int, Future[OpenShard]], *, pin: bool, some_known: bool):
        """`steps`: (shards, rows) of each."""
        self.maker, self.opened, self.some_known = maker, opened, some_known
        self.sizes = [len(rows) for _, rows in steps]
        self.shards, self.plan_rows = (steps[0] if len(steps) == 1 else
                                       tuple(np.concatenate(column) for column in zip(*steps, strict=True)))
        rows = self.plan_rows
        self.rows = np.empty_like(rows)
        self.decoded = np.ones(len(rows), dtype=bool)
        # Samples that are known need no room; whether any is to be made turns out when its shard is open.
        self._views = None if some_known else maker.empty(len(rows), pin)
        self._pin, self._one = pin, threading.Lock()
        self._targets: list[tuple[torch.Tensor, ...]] | None = None  # of the views, when first asked for
        self.label_tensor = torch.full((len(rows), source.classes), source.sidecar.unlisted, dtype=torch.int8,
                                       pin_memory=pin)
        self.labels = self.label_tensor.numpy()
        self.boxes = np.empty((len(rows), 4), dtype=np.float32)
        self.flips = np.zeros(len(rows), dtype=bool)
        self.bad: dict[int, BadSample] = {}
        self.parts: list[Future[None]] = []

    @property
    def views(self) -> torch.Tensor:
        if self._views is None:
            with self._one:
                if self._views is None:
                    self._views = self.maker.empty(len(self.rows), self._pin)
        return self._views

    def _of_sample(self, place: int) -> list[torch.Tensor]:
        """Its part of every view. All are cut at once: for a view of a tensor, threads queue at the interpreter's lock.
        """
        if self._targets is None:
            self._targets = [view.unbind() for view in self.views.unbind()]
        return [view[place] for view in self._targets]

    def take_vectors(self) -> None:
        """Everything, shard by shard; samples of a shard whose vectors are not decoded one by one."""
        out = self.views[0].numpy()
        for shard, future in self.opened.items():
            places, opened = np.flatnonzero(self.shards == shard), future.result()
            if opened.vectors is None:
                self.make(places)
                continue
            rows = opened.used[self.plan_rows[places]]
            self.rows[places], self.boxes[places] = rows, FULL_BOX
            out[places] = opened.vectors.values[rows]
            opened.labels.paint(self.labels, places, rows)
            for place, row in zip(places.tolist(), rows.tolist(), strict=True) if opened.vectors.bad else ():
                if row in opened.vectors.bad:
                    self.bad[place] = bad_sample(opened, row, opened.vectors.bad[row])

    def make(self, part: Iterable[int]) -> None:
        """Make the samples at these places of the batch."""
        # One sample at a time in plain Python: a part has few rows of each shard, too few for arrays to pay.
        places, members = [], []
        for i in part:
            opened = self.opened[int(self.shards[i])].result()
            row = int(opened.used[self.plan_rows[i]])
            self.rows[i] = row
            if opened.known is not None and opened.known[row]:
                self.decoded[i] = False
            else:
                places.append((i, opened, row))
                members.append(opened.read(row))
            if len(opened.labels.neg_ids):
                self.labels[i, opened.labels.negatives(row)] = NEGATIVE
            self.labels[i, opened.labels.positives(row)] = POSITIVE
        for (i, opened, row), (data, image) in zip(places, self.maker.each(members), strict=True):
            try:
                self.boxes[i], self.flips[i] = self.maker(data, opened.shard, row, self._of_sample(i), image)
            except DecodeError as error:
                self.bad[i] = bad_sample(opened, row, error)

    def results(self) -> list[Batch]:
        """Of every step, once all are made."""
        wait(self.parts, return_when=FIRST_EXCEPTION)  # wakes up once, not once a part: the workers need the cores
        for part in self.parts:
            part.result()
        ends = list(itertools.accumulate(self.sizes))
        return [self._batch(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    def _batch(self, start: int, stop: int) -> Batch:
        cut = slice(start, stop)
        views = self.maker.empty(0, False) if self._views is None else self._views[:, cut]
        batch = Batch(views[0], self.label_tensor[cut], self.shards[cut], self.rows[cut],
                      torch.from_numpy(self.boxes[cut]), torch.from_numpy(self.flips[cut]), self.shards[cut],
                      strong=views[1] if len(views) > 1 else None,
                      decoded=self.decoded[cut] if self.some_known else None)
        bad = [(i - start, self.bad[i]) for i in sorted(self.bad) if start <= i < stop] if self.bad else []
        return batch.without(bad) if bad else batch


def bad_sample(opened: OpenShard, row: int, error: DecodeError) -> BadSample:
    return BadSample(opened.url, row, opened.members.keys[row], str(error))
