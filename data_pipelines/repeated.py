"""A small set of samples again and again, beside an epoch: every pass in an order of its own, all of it computed.

These samples have no state, so no rank owns their shards: every rank takes an equal part of every batch. Which samples
a step takes depends on (seed, step) alone: the same on any number of ranks, and after a resume.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from lacuna.basics.hashing import mix, mix_array
from lacuna.data_pipelines.batch import BadSample, Batch
from lacuna.data_pipelines.decode import DecodeError
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import OpenShard, ShardSource
from lacuna.data_pipelines.stream import start_single_threaded

_OPEN = 8  # shards at a time
_KEPT_BYTES = 256 << 20  # undecoded samples that stay in memory: a small set is read once per launch


class RepeatedOrder:
    """Ordinals of `samples` samples, `batch` per step, each pass over all of them a permutation of its own."""

    def __init__(self, samples: int, batch: int, seed: int):
        self.samples, self.batch, self.seed = samples, batch, seed
        self._permutation = lru_cache(maxsize=2)(self._pass)

    def _pass(self, number: int) -> np.ndarray:
        return np.argsort(mix_array(mix(self.seed, number), np.arange(self.samples)), kind="stable")

    def step(self, step: int, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """(passes, ordinals) of this rank's part of a step, int64."""
        first, last = (step * self.batch + self.batch * r // world for r in (rank, rank + 1))
        passes, places = np.divmod(np.arange(first, last), self.samples)
        return passes, np.array([self._permutation(int(p))[place] for p, place in zip(passes, places, strict=True)],
                                dtype=np.int64)


class RepeatedStream:
    """Batches of one rank from a step on, without end; `close` (or the end of a `with` block) ends its threads.

    `maker` gives what makes the samples of a pass: augmentation differs from pass to pass.
    """

    def __init__(self, source: ShardSource, order: RepeatedOrder, maker: Callable[[int], SampleMaker], *, rank: int,
                 world: int, start_step: int, workers: int, prefetch: int, pin: bool = False):
        self.source, self.order, self.maker, self.pin = source, order, maker, pin
        self._part, self._step, self._prefetch = (rank, world), start_step, prefetch
        self._rows = Rows(source)
        self._pool = ThreadPoolExecutor(workers, "decode-repeated")
        start_single_threaded(self._pool, workers)
        self._pending: deque[Future[Batch]] = deque()

    def __enter__(self) -> RepeatedStream:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._pending) <= self._prefetch:
            self._pending.append(self._pool.submit(self._make, self._step))
            self._step += 1
        return self._pending.popleft().result()

    def _make(self, step: int) -> Batch:
        passes, ordinals = self.order.step(step, *self._part)
        count = len(ordinals)
        views = self.maker(0).empty(count, self.pin)
        boxes, flips = np.zeros((count, 4), dtype=np.float32), np.zeros(count, dtype=bool)
        labels = torch.empty((count, self.source.classes), dtype=torch.int8, pin_memory=self.pin)
        places = np.empty((count, 2), dtype=np.int64)
        good, bad = [], []
        for i, (number, ordinal) in enumerate(zip(passes.tolist(), ordinals.tolist(), strict=True)):
            sample = self._rows.read(ordinal)
            shard, row = places[i] = sample.shard, sample.row
            labels[i] = torch.from_numpy(sample.labels)
            try:
                for data, image in (maker := self.maker(number)).each([sample.data]):
                    boxes[i], flips[i] = maker(data, shard, row, views[:, i], image)
                good.append(i)
            except DecodeError as error:
                bad.append(BadSample(sample.url, row, sample.key, str(error)))
        kept = torch.tensor(good, dtype=torch.int64)
        shards, rows = places[good].T
        return Batch(views[0][kept] if bad else views[0], labels[kept] if bad else labels, shards, rows,
                     torch.from_numpy(boxes[good]), torch.from_numpy(flips[good]), places[:, 0], bad)


class Sample:
    """One row of a shard, undecoded."""

    def __init__(self, opened: OpenShard, used: int, classes: int):
        self.shard, self.row, self.url = opened.shard, int(opened.used[used]), opened.url
        self.data, self.key = opened.read(self.row), opened.members.keys[self.row]
        self.labels = opened.labels.dense(classes, np.array([self.row]))[0]


class Rows:
    """Samples by their ordinal among those that take part; the first ones to be read stay in memory."""

    def __init__(self, source: ShardSource):
        self.source, self.ends = source, np.cumsum(source.counts)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._kept: dict[int, Sample] = {}
        self._bytes, self._lock = 0, threading.Lock()

    def read(self, ordinal: int) -> Sample:
        with self._lock:
            found = self._kept.get(ordinal)
            if found is None:
                shard = int(np.searchsorted(self.ends, ordinal, "right"))
                used = ordinal - int(self.ends[shard]) + int(self.source.counts[shard])
                found = Sample(self._opened(shard), used, self.source.classes)
                if self._bytes + len(found.data) <= _KEPT_BYTES:
                    self._kept[ordinal] = found
                    self._bytes += len(found.data)
            return found

    def _opened(self, shard: int) -> OpenShard:
        if shard not in self._open:
            if len(self._open) == _OPEN:
                self._open.popitem(last=False)
            self._open[shard] = self.source.open(shard)
        self._open.move_to_end(shard)
        return self._open[shard]
