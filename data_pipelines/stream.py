"""One rank's share of an epoch as decoded batches, in plan order, exactly once, from any step on.

Legend: n samples of a batch, L classes. Decoding runs in threads: the decoders and resizers release the GIL, so
there is nothing to pickle, copy between processes or re-seed, and the order is the plan's by construction. Another
thread walks the plan and hands the batches out: whoever iterates only takes what is ready.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch

from lacuna.basics import storage
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.pending_batches import PendingBatches
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.shard_vectors import ShardVectors
from lacuna.data_pipelines.source import OpenShard, ShardSource

_PART = 8  # samples that a worker takes at a time: enough to hide the hand-over, few enough to share a batch evenly
_TOGETHER = 2048  # vectors that are made at a time: a thread's hand-over costs more than many of them


class EpochStream:
    """Iterate over it once; `close` (or the end of a `with` block) ends its threads.

    At most streams × (open_shards + 1) shards are open, unless what is made at a time needs more (tiny shards).
    `known(shard)`, bool [rows of the tar], says which samples are known already: those are not decoded.
    """

    def __init__(self, source: ShardSource, plan: EpochPlan, streams: range, maker: SampleMaker, *,
                 start_step: int = 0, workers: int = 2, prefetch: int = 4, pin: bool = False,
                 known: Callable[[int], np.ndarray] | None = None):
        self.source, self.plan, self.maker, self.pin, self.known = source, plan, maker, pin, known
        self._streams, self._batches = streams, plan.batches(streams, start_step)
        self._together = self._steps_together()
        self.workers, self._ahead = max(1, workers), max(1, prefetch // self._together)
        self._pool = ThreadPoolExecutor(self.workers, "decode")
        # A local shard is opened in milliseconds; downloads wait for the network, so there may be more of them.
        openers = 2 if storage.is_local(source.index.url) else min(8, max(2, len(streams)))
        self._openers = ThreadPoolExecutor(openers, "open-shard")
        self._place = {shard: (stream, place) for stream in streams
                       for place, shard in enumerate(plan.stream_shards[stream])}
        self._open: dict[int, Future[OpenShard]] = {}
        self._feeder = threading.Thread(target=self._feed, name="plan", daemon=True)
        self._in_flight: deque[PendingBatches] = deque()  # of the feeder
        self._ready: SimpleQueue[PendingBatches | BaseException | None] = SimpleQueue()  # None: the epoch is over
        self._room = threading.Semaphore(self._ahead)
        self._closing = False

    def __enter__(self) -> EpochStream:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is not yet begun, wait for what is, and let go of every shard."""
        self._closing = True
        self._room.release()
        if self._feeder.ident is not None:
            self._feeder.join()
        # Openers first: a decoder that waits for a shard whose opening is cancelled ends at once.
        self._openers.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._openers.shutdown(wait=True)
        while not self._ready.empty():
            self._ready.get()
        self._in_flight.clear()
        self._open.clear()

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(self):
            start_single_threaded(self._pool, self.workers)
            self._feeder.start()
            while (pending := self._ready.get()) is not None:
                if isinstance(pending, BaseException):
                    raise pending
                made = pending.results()
                del pending  # its shards may be closed
                self._room.release()
                yield from made

    def _feed(self) -> None:
        try:
            while steps := list(itertools.islice(self._batches, self._together)):
                self._room.acquire()
                if self._closing:
                    return
                if len(self._in_flight) == self._ahead:  # there is room: the oldest has been taken
                    self._in_flight.popleft()
                self._in_flight.append(self._submit(steps))
                self._ready.put(self._in_flight[-1])
            self._ready.put(None)
        except BaseException as error:  # whoever iterates has to hear of it
            self._ready.put(error)

    def _steps_together(self) -> int:
        """Steps that are made at a time: of vectors as many as the shards that are open anyway hold."""
        if self.maker.augment is not None:
            return 1
        used = self.plan.counts[self.plan.counts > 0]
        held = len(self._streams) * self.plan.open_shards * int(used.mean()) if len(used) else 0
        return max(1, min(_TOGETHER, held) // (self.plan.quota * len(self._streams)))

    def _submit(self, steps: list[tuple[np.ndarray, np.ndarray]]) -> PendingBatches:
        needed = np.unique(np.concatenate([shards for shards, _ in steps])).tolist()
        for shard in needed:
            self._start_opening(shard)
        pending = PendingBatches(self.source, self.maker, steps, {shard: self._open[shard] for shard in needed},
                                 pin=self.pin, some_known=self.known is not None)
        self._let_go(needed)
        self._open_ahead(needed, pending)
        if self.maker.augment is None:  # a vector costs less than handing it over
            pending.parts.append(self._pool.submit(pending.take_vectors))
            return pending
        for start in range(0, len(pending.rows), _PART):
            part = range(start, min(start + _PART, len(pending.rows)))
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

    def _open_ahead(self, needed: list[int], current: PendingBatches) -> None:
        """Begin to open the next shard of every stream, as soon as batches in flight leave room for it."""
        alive = set(self._open).union(*(pending.opened for pending in [current, *self._in_flight]))
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
