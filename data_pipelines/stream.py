"""One rank's share of an epoch as decoded batches, in plan order, exactly once, from any step on.

Legend: n samples of a batch, L classes. Decoding runs in threads: the decoders and resizers release the GIL, so
there is nothing to pickle, copy between processes or re-seed, and the order is the plan's by construction.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from lacuna.basics import storage
from lacuna.data_pipelines.augment import FULL_BOX, Augment, Box, sample_rng
from lacuna.data_pipelines.batch import BadSample, Batch
from lacuna.data_pipelines.decode import DecodeError, decode_scaled, decode_vector
from lacuna.data_pipelines.device_decoder import Decoded, DeviceDecoder
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.shard_vectors import ShardVectors
from lacuna.data_pipelines.source import OpenShard, ShardSource

_PART = 8  # samples that a worker takes at a time: enough to hide the hand-over, few enough to share a batch evenly


@dataclass(frozen=True)
class SampleMaker:
    """Bytes of one member to a model input."""

    augment: Augment | None  # None: feature shards
    seed: int
    epoch: int
    features: int = 0
    strong: Augment | None = None  # makes a second view
    decoder: DeviceDecoder | None = None  # for JPEGs, instead of the host's

    @property
    def _scaled(self) -> bool:
        # A second view with a crop of its own is cut from the same pixels, and its box is not known yet.
        return (self.augment is not None and self.augment.scaled_decode and self.augment.crop == "random_resized"
                and (self.strong is None or self.strong.crop == "same"))

    def empty(self, count: int, pin: bool) -> torch.Tensor:
        """[views, count, …]"""
        if self.augment is None:
            return torch.empty((1, count, self.features), pin_memory=pin)
        views, side = 1 if self.strong is None else 2, self.augment.size
        return torch.empty((views, count, 3, side, side), dtype=torch.uint8, pin_memory=pin)

    def each(self, members: list[bytes]) -> Iterator[tuple[bytes, Decoded | None]]:
        """Members that are made together, with those images that a device has decoded; make them before the end."""
        if self.decoder is None:
            yield from ((data, None) for data in members)
            return
        with self.decoder.queue():
            yield from zip(members, self.decoder(members), strict=True)

    def __call__(self, data: bytes, shard: int, row: int, views: torch.Tensor,
                 decoded: Decoded | None = None) -> tuple[Box, bool]:
        """Fill every view; the crop box of the first and whether it was flipped."""
        out = views[0]
        if self.augment is None:
            vector = decode_vector(data)
            if len(vector) != self.features:
                raise DecodeError(f"vector of {len(vector)} numbers, the others have {self.features}")
            out.copy_(torch.from_numpy(vector))
            return FULL_BOX, False
        rng = sample_rng(self.seed, self.epoch, shard, row)
        image, full = decoded or decode_scaled(data, partial(self.augment.shrink, rng=rng) if self._scaled else None)
        _, box, flipped = self.augment(image, rng, out, full)
        if self.strong is not None:
            # The same generator goes on: other draws than the first view's.
            self.strong(out if self.strong.crop == "same" else image, rng, views[1])
        return box, flipped


class EpochStream:
    """Iterate over it once; `close` (or the end of a `with` block) ends its threads.

    At most streams × (open_shards + 1) shards are open, unless a single batch needs more (tiny shards).
    `known(shard)`, bool [rows of the tar], says which samples are known already: those are not decoded.
    """

    def __init__(self, source: ShardSource, plan: EpochPlan, streams: range, maker: SampleMaker, *,
                 start_step: int = 0, workers: int = 2, prefetch: int = 4, pin: bool = False,
                 known: Callable[[int], np.ndarray] | None = None):
        self.source, self.plan, self.maker, self.pin, self.known = source, plan, maker, pin, known
        self.workers, self.prefetch = max(1, workers), max(1, prefetch)
        self._batches = plan.batches(streams, start_step)
        self._pool = ThreadPoolExecutor(self.workers, "decode")
        # A local shard is opened in milliseconds; downloads wait for the network, so there may be more of them.
        openers = 2 if storage.is_local(source.index.url) else min(8, max(2, len(streams)))
        self._openers = ThreadPoolExecutor(openers, "open-shard")
        self._place = {shard: (stream, place) for stream in streams
                       for place, shard in enumerate(plan.stream_shards[stream])}
        self._open: dict[int, Future[OpenShard]] = {}
        self._pending: deque[_Pending] = deque()

    def __enter__(self) -> EpochStream:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is not yet begun, wait for what is, and let go of every shard."""
        # Openers first: a decoder that waits for a shard whose opening is cancelled ends at once.
        self._openers.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._openers.shutdown(wait=True)
        self._pending.clear()
        self._open.clear()

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(self):
            start_single_threaded(self._pool, self.workers)
            for shards, rows in self._batches:
                self._pending.append(self._submit(shards, rows))
                if len(self._pending) > self.prefetch:
                    yield self._pending.popleft().result()
            while self._pending:
                yield self._pending.popleft().result()

    def _submit(self, shards: np.ndarray, rows: np.ndarray) -> _Pending:
        needed = np.unique(shards).tolist()
        for shard in needed:
            self._start_opening(shard)
        pending = _Pending(self, shards, rows, {shard: self._open[shard] for shard in needed})
        self._let_go(needed)
        self._open_ahead(needed, pending)
        if self.maker.augment is None:  # a vector costs less than handing it over
            pending.parts.append(self._pool.submit(pending.take_vectors))
            return pending
        for start in range(0, len(rows), _PART):
            part = range(start, min(start + _PART, len(rows)))
            pending.parts.append(self._pool.submit(pending.make, part))
        return pending

    def _start_opening(self, shard: int) -> None:
        if shard not in self._open:
            self._open[shard] = self._openers.submit(self._opened, shard)

    def _opened(self, shard: int) -> OpenShard:
        opened = self.source.open(shard, self.known(shard) if self.known else None)
        if self.maker.augment is None and opened.known is None and ShardVectors.fit(opened, self.maker.features):
            opened.vectors = ShardVectors(opened, self.maker, self.maker.features)
        return opened

    def _let_go(self, needed: list[int]) -> None:
        """Drop shards that the plan has passed: those m or more places behind the newest one of their stream."""
        newest = self._newest(needed)
        for shard in list(self._open):
            stream, place = self._place[shard]
            if shard not in needed and place <= newest.get(stream, 0) - self.plan.open_shards:
                del self._open[shard]

    def _open_ahead(self, needed: list[int], current: _Pending) -> None:
        """Begin to open the next shard of every stream, as soon as batches in flight leave room for it."""
        alive = set(self._open).union(*(pending.opened for pending in [current, *self._pending]))
        count = Counter(self._place[shard][0] for shard in alive)
        for stream, place in self._newest(needed).items():
            order = self.plan.stream_shards[stream]
            if place + 1 < len(order) and count[stream] <= self.plan.open_shards:
                self._start_opening(order[place + 1])

    def _newest(self, shards: list[int]) -> dict[int, int]:
        """The last place in its stream's order that each stream has reached."""
        newest: dict[int, int] = {}
        for shard in shards:
            stream, place = self._place[shard]
            newest[stream] = max(place, newest.get(stream, 0))
        return newest


class _Pending:
    """A batch whose samples are being made."""

    def __init__(self, stream: EpochStream, shards: np.ndarray, rows: np.ndarray, opened: dict[int, Future[OpenShard]]):
        self.maker, self.shards, self.opened = stream.maker, shards, opened
        self.plan_rows = rows
        self.rows = np.empty_like(rows)
        self.some_known = stream.known is not None
        self.decoded = np.ones(len(rows), dtype=bool)
        # Samples that are known need no room; whether any is to be made turns out when its shard is open.
        self._views = None if self.some_known else stream.maker.empty(len(rows), stream.pin)
        self._pin, self._one = stream.pin, threading.Lock()
        sidecar = stream.source.sidecar
        self.label_tensor = torch.full((len(rows), stream.source.classes), sidecar.unlisted, dtype=torch.int8,
                                       pin_memory=stream.pin)
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

    def take_vectors(self) -> None:
        """The whole batch, shard by shard; samples of a shard whose vectors are not decoded one by one."""
        out, classes = self.views[0].numpy(), self.labels.shape[1]
        for shard, future in self.opened.items():
            places, opened = np.flatnonzero(self.shards == shard), future.result()
            if opened.vectors is None:
                self.make(places)
                continue
            rows = opened.used[self.plan_rows[places]]
            self.rows[places], self.boxes[places] = rows, FULL_BOX
            out[places] = opened.vectors.values[rows]
            self.labels[places] = opened.labels.dense(classes, rows)
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
                self.boxes[i], self.flips[i] = self.maker(data, opened.shard, row, self.views[:, i], image)
            except DecodeError as error:
                self.bad[i] = bad_sample(opened, row, error)

    def result(self) -> Batch:
        wait(self.parts, return_when=FIRST_EXCEPTION)  # wakes up once, not once a part: the workers need the cores
        for part in self.parts:
            part.result()
        views = self.maker.empty(0, False) if self._views is None else self._views
        batch = Batch(views[0], self.label_tensor, self.shards, self.rows,
                      torch.from_numpy(self.boxes), torch.from_numpy(self.flips), self.shards,
                      strong=views[1] if len(views) > 1 else None,
                      decoded=self.decoded if self.some_known else None)
        return batch.without([(i, self.bad[i]) for i in sorted(self.bad)]) if self.bad else batch


def bad_sample(opened: OpenShard, row: int, error: DecodeError) -> BadSample:
    return BadSample(opened.url, row, opened.members.keys[row], str(error))


def start_single_threaded(pool: ThreadPoolExecutor, workers: int) -> None:
    """Start all threads of a fresh pool, each without torch threads of its own.

    torch's setting belongs to a thread, but also becomes the default of threads that start later: so all workers are
    started here, and then the caller's setting is made the default again.
    """
    together = threading.Barrier(workers + 1)

    def settle() -> None:
        torch.get_num_threads()  # a thread takes over the default at its first question, even after it was told
        torch.set_num_threads(1)
        together.wait()

    threads = torch.get_num_threads()
    for _ in range(workers):
        pool.submit(settle)
    together.wait()
    torch.set_num_threads(threads)
