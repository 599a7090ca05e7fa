"""One rank's share of an epoch as decoded batches, in plan order, exactly once, from any step on.

Legend: n samples of a batch, L classes. Decoding runs in threads: the decoders and resizers release the GIL, so
there is nothing to pickle, copy between processes or re-seed, and the order is the plan's by construction.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from data_pipelines.augment import FULL_BOX, Augment, sample_rng
from data_pipelines.decode import DecodeError, decode_image, decode_vector
from data_pipelines.plan import EpochPlan
from data_pipelines.source import OpenShard, ShardSource


@dataclass(frozen=True)
class BadSample:
    shard: str
    row: int
    key: str
    reason: str


@dataclass
class Batch:
    """Samples of one step on one rank; a corrupt sample kept its slot in the plan but is not in here."""

    inputs: torch.Tensor  # uint8 [n, 3, H, W], or float32 [n, D] for feature shards
    labels: torch.Tensor  # int8 [n, L]
    shards: np.ndarray  # int64 [n]
    rows: np.ndarray  # int64 [n], position in the tar
    boxes: torch.Tensor  # float32 [n, 4]
    flips: torch.Tensor  # bool [n]
    bad: list[BadSample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def narrow(self, start: int, stop: int) -> Batch:
        """A micro-batch; bad samples are reported by the whole."""
        cut = slice(start, stop)
        return Batch(self.inputs[cut], self.labels[cut], self.shards[cut], self.rows[cut], self.boxes[cut],
                     self.flips[cut])


@dataclass(frozen=True)
class SampleMaker:
    """Bytes of one member to a model input."""

    augment: Augment | None  # None: feature shards
    seed: int
    epoch: int
    features: int = 0

    def empty(self, count: int, pin: bool) -> torch.Tensor:
        if self.augment is None:
            return torch.empty((count, self.features), pin_memory=pin)
        return torch.empty((count, 3, self.augment.size, self.augment.size), dtype=torch.uint8, pin_memory=pin)

    def __call__(self, data: bytes, shard: int, row: int, out: torch.Tensor) -> tuple[tuple, bool]:
        if self.augment is None:
            vector = decode_vector(data)
            if len(vector) != self.features:
                raise DecodeError(f"vector of {len(vector)} numbers, the others have {self.features}")
            out.copy_(torch.from_numpy(vector))
            return FULL_BOX, False
        image, box, flipped = self.augment(decode_image(data), sample_rng(self.seed, self.epoch, shard, row))
        out.copy_(image)
        return box, flipped


class EpochStream:
    """Iterate over it once; `close` (or the end of a `with` block) ends its threads."""

    def __init__(self, source: ShardSource, plan: EpochPlan, streams: range, maker: SampleMaker, *,
                 start_step: int = 0, workers: int = 2, prefetch: int = 4, pin: bool = False):
        self.source, self.plan, self.maker, self.pin = source, plan, maker, pin
        self.workers, self.prefetch = max(1, workers), max(1, prefetch)
        self._batches = plan.batches(streams, start_step)
        self._pool = ThreadPoolExecutor(self.workers, "decode", initializer=torch.set_num_threads, initargs=(1,))
        self._openers = ThreadPoolExecutor(2, "open-shard")
        self._place = {shard: (stream, place) for stream in streams
                       for place, shard in enumerate(plan.stream_shards[stream])}
        self._open: dict[int, Future[OpenShard]] = {}

    def __enter__(self) -> EpochStream:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._openers.shutdown(wait=True, cancel_futures=True)
        self._open.clear()

    def __iter__(self) -> Iterator[Batch]:
        threads = torch.get_num_threads()
        pending: deque[_Pending] = deque()
        with contextlib.closing(self):
            for shards, rows in self._batches:
                pending.append(self._submit(shards, rows))
                # A worker's set_num_threads also reaches the process-wide BLAS setting: put the caller's back.
                if len(pending) == 1 and torch.get_num_threads() != threads:
                    torch.set_num_threads(threads)
                if len(pending) > self.prefetch:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _submit(self, shards: np.ndarray, rows: np.ndarray) -> _Pending:
        opened = {int(s): self._shard(int(s)) for s in np.unique(shards)}
        self._let_go(opened)
        pending = _Pending(self, shards, rows, opened)
        for part in np.array_split(np.arange(len(rows)), min(self.workers * 2, max(1, len(rows)))):
            if len(part):
                pending.parts.append(self._pool.submit(pending.make, part))
        return pending

    def _shard(self, shard: int) -> Future[OpenShard]:
        """The shard's future; also starts to open the next one of its stream."""
        stream, place = self._place[shard]
        order = self.plan.stream_shards[stream]
        for ahead in order[place : place + 2]:
            if ahead not in self._open:
                self._open[ahead] = self._openers.submit(self.source.open, ahead)
        return self._open[shard]

    def _let_go(self, in_use: dict[int, Future[OpenShard]]) -> None:
        """Drop shards that the plan has passed: those m or more places behind the newest one of their stream."""
        newest: dict[int, int] = {}
        for shard in in_use:
            stream, place = self._place[shard]
            newest[stream] = max(place, newest.get(stream, 0))
        for shard in [s for s in self._open if s not in in_use]:
            stream, place = self._place[shard]
            if place <= newest.get(stream, 0) - self.plan.open_shards:
                del self._open[shard]


class _Pending:
    """A batch whose samples are being made."""

    def __init__(self, stream: EpochStream, shards: np.ndarray, rows: np.ndarray, opened: dict[int, Future[OpenShard]]):
        self.stream, self.shards, self.opened = stream, shards, opened
        self.plan_rows = rows
        self.rows = np.empty_like(rows)
        self.inputs = stream.maker.empty(len(rows), stream.pin)
        self.labels = np.empty((len(rows), stream.source.classes), dtype=np.int8)
        self.boxes = torch.empty((len(rows), 4))
        self.flips = torch.zeros(len(rows), dtype=torch.bool)
        self.bad: dict[int, BadSample] = {}
        self.parts: list[Future[None]] = []

    def make(self, part: np.ndarray) -> None:
        for shard in np.unique(self.shards[part]):
            where = part[self.shards[part] == shard]
            opened = self.opened[int(shard)].result()
            self.rows[where] = opened.used[self.plan_rows[where]]
            self.labels[where] = opened.labels.dense(self.labels.shape[1], self.rows[where])
            for i in where:
                row = int(self.rows[i])
                try:
                    box, flipped = self.stream.maker(opened.read(row), int(shard), row, self.inputs[i])
                except DecodeError as error:
                    self.bad[int(i)] = BadSample(opened.url, row, opened.members.keys[row], str(error))
                    continue
                self.boxes[i] = torch.tensor(box)
                self.flips[i] = flipped

    def result(self) -> Batch:
        for part in self.parts:
            part.result()
        batch = Batch(self.inputs, torch.from_numpy(self.labels), self.shards, self.rows, self.boxes, self.flips)
        if self.bad:
            good = np.array([i for i in range(len(self.rows)) if i not in self.bad], dtype=np.int64)
            kept = torch.from_numpy(good)
            batch = Batch(batch.inputs[kept], batch.labels[kept], batch.shards[good], batch.rows[good],
                          batch.boxes[kept], batch.flips[kept], [self.bad[i] for i in sorted(self.bad)])
        return batch
