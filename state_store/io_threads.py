"""The I/O threads of a session: read shards ahead in opening order, write released ones behind, within the given slots.

One condition variable guards all records; the threads hold it only to pick and to finish a task. Slots are the only
buffers, so memory is bounded: when writing falls behind, reading ahead waits, and then the step does (that is the
stall time). Released shards are written before more is read ahead, unless the step is waiting for a read.
While enough shards are ready only half of the threads work: the step then shares the cores and the interpreter lock
with less (on 2 cores the worst delay of a step after a release halved).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lacuna.basics.errors import UserError

# A release is followed at once by the next batch's gather: background work starts after it, when the step computes.
_QUIET_SECONDS = 0.004
LOADING, READY, LEASED, WRITING = "loading", "ready", "leased", "writing"


@dataclass
class Record:
    """One shard in a slot."""

    shard: int
    slot: int
    state: str = LOADING
    left: int = 0  # field tasks that are not finished


@dataclass
class Metrics:
    leases: int = 0
    stalls: int = 0
    stall_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    chunks_read: int = 0
    chunks_written: int = 0


class IoThreads:
    """`load(field, shard, slot)` and `store(field, shard, slot)` do the work of one chunk, in an I/O thread."""

    def __init__(self, fields: Sequence[str], slots: int, threads: int, load: Callable[[str, int, int], None],
                 store: Callable[[str, int, int], None]):
        self.fields, self.load, self.store = list(fields), load, store
        self.metrics = Metrics()
        self.changed = threading.Condition()
        self.records: dict[int, Record] = {}
        self.free = list(range(slots))
        self.ahead: deque[int] = deque()  # shards to read, in opening order
        self.reads: deque[tuple[Record, str]] = deque()
        self.writes: deque[tuple[Record, str]] = deque()
        self.running = 0  # tasks being worked on
        self.relaxed = max(1, threads // 2)  # threads that work while there is no hurry
        self.quiet_until = 0.0  # when work that nobody waits for may start
        self.waiting = False  # the step is waiting, for a read or for the writes
        self.wanted: int | None = None  # the shard that the step is waiting for
        self.error: BaseException | None = None
        self.stopping = False
        self.threads = [threading.Thread(target=self._work, name=f"state-io-{i}", daemon=True) for i in range(threads)]
        for thread in self.threads:
            thread.start()

    # ---- called by the session, from the training thread

    def prefetch(self, order: Sequence[int]) -> None:
        with self.changed:
            self._check()
            planned = set(order)
            for record in [r for r in self.records.values() if r.state == READY and r.shard not in planned]:
                self._drop(record)  # read ahead for an older plan
            self.ahead = deque(shard for shard in order if shard not in self.records)
            self._admit()
            self.changed.notify_all()

    def lease(self, shard: int) -> Record:
        """Wait until the shard is in a slot; the time waited is the stall."""
        with self.changed:
            self._check()
            record = self.records.get(shard)
            if record is not None and record.state == LEASED:
                raise UserError(f"shard {shard} is leased already; release it before leasing it again.")
            self.metrics.leases += 1
            if record is None or record.state != READY:
                record = self._wait_for(shard)
            record.state = LEASED
            if self._hurry():
                self.changed.notify_all()
            return record

    def _wait_for(self, shard: int) -> Record:
        started = time.perf_counter()
        self.wanted, self.waiting = shard, True
        try:
            while True:
                self._check()
                record = self.records.get(shard)
                if record is not None and record.state == READY:
                    return record
                if record is None:
                    self._want(shard)
                self.changed.notify_all()
                self.changed.wait()
        finally:
            self.wanted, self.waiting = None, False
            self.metrics.stalls += 1
            self.metrics.stall_seconds += time.perf_counter() - started

    def _want(self, shard: int) -> None:
        """Put the shard first in line; if every slot is taken, give back one that was read ahead and not yet leased."""
        if shard in self.ahead:
            self.ahead.remove(shard)
        self.ahead.appendleft(shard)
        self._admit()
        if shard in self.records or any(r.state in (WRITING, LOADING) for r in self.records.values()):
            return
        spare = [r for r in self.records.values() if r.state == READY]
        if not spare:
            raise UserError(f"RAM budget too small: all {len(self.records)} slots hold leased shards and shard {shard} "
                            "is needed. Raise the state RAM budget, or open fewer shards at a time.")
        self._drop(spare[-1])
        self.ahead.insert(1, spare[-1].shard)
        self._admit()

    def release(self, shard: int, dirty: Sequence[str]) -> None:
        with self.changed:
            self._check()
            record = self.records[shard]
            record.state = WRITING
            self._enqueue_writes(record, dirty)
            self._admit()
            self.quiet_until = time.perf_counter() + _QUIET_SECONDS
            self.changed.notify_all()

    def spill(self, dirty: dict[int, Sequence[str]]) -> None:
        """Write leased shards without releasing them; returns when everything written is on its way to the disk."""
        with self.changed:
            self._check()
            for shard, fields in dirty.items():
                self._enqueue_writes(self.records[shard], fields)
            self.changed.notify_all()
        self.drain()

    def drain(self) -> None:
        """Wait until no write is queued or running."""
        with self.changed:
            self.waiting = True
            self.changed.notify_all()
            try:
                while self.writes or any(r.left for r in self.records.values() if r.state in (WRITING, LEASED)):
                    self._check()
                    self.changed.wait()
                self._check()
            finally:
                self.waiting = False

    def forget(self) -> None:
        """Stop reading ahead and drop shards that are read but not leased (their versions may be about to change)."""
        with self.changed:
            self.ahead.clear()
            while any(r.state == LOADING for r in self.records.values()):
                self._check()
                self.changed.wait()
            self._check()
            for record in [r for r in self.records.values() if r.state == READY]:
                self._drop(record)

    def stop(self) -> None:
        """End the threads after the chunk each is working on; what is queued is not written."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join()

    # ---- with the condition held

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self.stopping:
            raise UserError("this session is closed; open a new one.")

    def _admit(self) -> None:
        while self.ahead and self.free:
            shard = self.ahead.popleft()
            if shard in self.records:
                if self.records[shard].state == WRITING:  # wait for its write-back, then read it again
                    self.ahead.appendleft(shard)
                    return
                continue
            record = Record(shard, self.free.pop(), LOADING, len(self.fields))
            self.records[shard] = record
            self.reads.extend((record, name) for name in self.fields)

    def _enqueue_writes(self, record: Record, fields: Sequence[str]) -> None:
        record.left += len(fields)
        self.writes.extend((record, name) for name in fields)
        if record.state == WRITING and not record.left:
            self._drop(record)

    def _drop(self, record: Record) -> None:
        del self.records[record.shard]
        self.free.append(record.slot)

    def _hurry(self) -> bool:
        """Whether the step waits or soon will: fewer shards are ready than the threads can read at a time."""
        if self.waiting:
            return True
        ready = sum(record.state == READY for record in self.records.values())
        return ready < len(self.threads) and bool(self.reads or self.ahead)

    def _next(self) -> tuple[Record, str, Callable[[str, int, int], None]] | None:
        if self.error is not None:
            return None
        if (self.running >= self.relaxed or time.perf_counter() < self.quiet_until) and not self._hurry():
            return None
        if self.wanted is not None:
            for i, (record, name) in enumerate(self.reads):
                if record.shard == self.wanted:
                    del self.reads[i]
                    return record, name, self.load
        if self.writes:
            return (*self.writes.popleft(), self.store)
        if self.reads:
            return (*self.reads.popleft(), self.load)
        return None

    def _work(self) -> None:
        while True:
            with self.changed:
                task = self._next()
                while task is None and not self.stopping:
                    quiet = self.quiet_until - time.perf_counter()
                    self.changed.wait(quiet if quiet > 0 else None)
                    task = self._next()
                if task is None or self.stopping:
                    return
                self.running += 1
            record, name, call = task
            try:
                call(name, record.shard, record.slot)
            except BaseException as error:  # handed to the training thread, which must not go on with partial state
                with self.changed:
                    self.error = self.error or error
                    self.changed.notify_all()
                return
            with self.changed:
                self.running -= 1
                record.left -= 1
                if not record.left:
                    self._finished(record)
                    self.changed.notify_all()

    def _finished(self, record: Record) -> None:
        if record.state == LOADING:
            record.state = READY
        elif record.state == WRITING:
            self._drop(record)
            self._admit()
