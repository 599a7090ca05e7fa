"""The epoch plan: which rank reads which (shard, row) at which step, as a pure function of what is known up front.

Shards are dealt to C canonical streams; a global batch takes B/C samples from every stream; a rank owns whole
streams. So the composition of every global batch is the same for any number of ranks, and a position in the epoch
is one integer, the step.

Inside a stream, shard j of the stream's order lives during [max(0, j-m+1), j+1) on a time axis with one unit a
shard, and each of its rows is drawn to a hashed moment of that life; the stream's order is the order of moments.
About m shards are open at a time, openings and closings are one unit apart (so write-backs do not come in bursts),
and any window of the order can be computed from m shards alone: memory does not grow with the dataset.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix, mix_array, uniform_array

_DEAL, _MOMENT = 1, 2  # keeps the two uses of the seed apart


@dataclass(frozen=True)
class EpochPlan:
    """`counts[s]` samples of shard s take part; a row here counts the *used* samples of its shard (0..counts[s]-1)."""

    counts: np.ndarray  # int64 [shards]
    seed: int
    epoch: int
    streams: int
    batch: int
    open_shards: int = 4
    shuffle: bool = True

    def __post_init__(self):
        if self.batch % self.streams:
            raise UserError(
                f"data.streams = {self.streams} does not divide the global batch {self.batch}. "
                "Set data.streams to a divisor of every phase's batch, "
                f"e.g. {_largest_divisor(self.batch, self.streams)}."
            )

    @property
    def quota(self) -> int:
        """Samples that one stream gives to a global batch."""
        return self.batch // self.streams

    @cached_property
    def stream_shards(self) -> list[list[int]]:
        """Non-empty shards of every stream, in opening order; streams are balanced by number of samples."""
        used = np.flatnonzero(self.counts)
        if self.shuffle:
            used = used[np.argsort(mix_array(mix(self.seed, self.epoch, _DEAL), used), kind="stable")]
        place = {int(s): i for i, s in enumerate(used)}
        load = [(0, stream) for stream in range(self.streams)]
        dealt: list[list[int]] = [[] for _ in range(self.streams)]
        # Largest first onto the lightest stream: uneven shards still give streams of nearly equal length.
        for shard in sorted(place, key=lambda s: (-int(self.counts[s]), place[s])):
            samples, stream = heapq.heappop(load)
            dealt[stream].append(shard)
            heapq.heappush(load, (samples + int(self.counts[shard]), stream))
        return [sorted(shards, key=lambda s: place[s]) for shards in dealt]

    @cached_property
    def stream_samples(self) -> np.ndarray:
        """int64 [streams]"""
        return np.array([int(self.counts[s].sum()) if s else 0 for s in self.stream_shards], dtype=np.int64)

    @property
    def steps(self) -> int:
        """Global batches in this epoch; every sample is in exactly one."""
        return int(-(-self.stream_samples.max(initial=0) // self.quota))

    def rank_streams(self, rank: int, world: int) -> range:
        if self.streams % world:
            raise UserError(
                f"data.streams = {self.streams} is not a multiple of the {world} ranks. "
                f"Set data.streams to a multiple of every world size that this run will use."
            )
        each = self.streams // world
        return range(rank * each, (rank + 1) * each)

    def walk(self, stream: int, start: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(shards, rows) of one stream from position `start` on, one time unit a piece; int64 arrays."""
        shards = self.stream_shards[stream]
        moments: dict[int, np.ndarray] = {}
        skipped = 0
        for unit in range(len(shards)):
            parts_time, parts_shard, parts_row = [], [], []
            for j in range(unit, min(unit + self.open_shards, len(shards))):
                if j not in moments:
                    moments[j] = self._moments(shards[j], j)
                rows = np.flatnonzero(np.floor(moments[j]) == unit)
                parts_time.append(moments[j][rows])
                parts_shard.append(np.full(len(rows), shards[j], dtype=np.int64))
                parts_row.append(rows)
            del moments[unit]
            order = np.argsort(np.concatenate(parts_time), kind="stable")
            keep = order[max(0, start - skipped) :]
            skipped += len(order)
            if len(keep):
                yield np.concatenate(parts_shard)[keep], np.concatenate(parts_row)[keep]

    def _moments(self, shard: int, place: int) -> np.ndarray:
        """float64 [rows]: when each row of the shard is due; the life of the shard ends at place + 1."""
        count = int(self.counts[shard])
        if not self.shuffle:
            return place + (np.arange(count) + 0.5) / count
        begin = max(0, place - self.open_shards + 1)
        draws = uniform_array(mix(self.seed, self.epoch, _MOMENT, shard), np.arange(count))
        return begin + draws * (place + 1 - begin)

    def batches(self, streams: range, start_step: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(shards, rows) that these streams give to every step from `start_step` to the end, possibly none."""
        queues = [_Queue(self.walk(stream, start_step * self.quota)) for stream in streams]
        for _ in range(start_step, self.steps):
            pieces = [queue.take(self.quota) for queue in queues]
            yield np.concatenate([p[0] for p in pieces]), np.concatenate([p[1] for p in pieces])

    def outlook(self, streams: range, start_step: int = 0) -> Outlook:
        """One walk ahead of the epoch, a time unit at a time."""
        remaining = np.zeros(len(self.counts), dtype=np.int64)
        first_use: list[tuple[int, int]] = []
        at_once = 0
        for stream in streams:
            ends = [0]
            for shards, _ in self.walk(stream, start_step * self.quota):
                counts = np.bincount(shards, minlength=len(self.counts))
                for shard in np.flatnonzero((counts > 0) & (remaining == 0)):
                    first_use.append((ends[-1] + int(np.argmax(shards == shard)), int(shard)))
                remaining += counts
                ends.append(ends[-1] + len(shards))
            first = np.arange(0, ends[-1], self.quota)
            last = np.minimum(first + self.quota, ends[-1]) - 1
            crossed = np.searchsorted(ends, last, "right") - np.searchsorted(ends, first, "right")
            at_once += min(len(self.stream_shards[stream]), self.open_shards + int(crossed.max(initial=0)))
        return Outlook(remaining, [shard for _, shard in sorted(first_use)], at_once)


@dataclass
class Outlook:
    """What an epoch still asks of the shards of some streams, for whoever holds something per shard."""

    remaining: np.ndarray  # int64 [shards]: samples that each shard has still to give
    order: list[int]  # the shards in the order of their first use
    at_once: int  # shards in use at a time: those open, and one more for every time unit that a batch crosses


class _Queue:
    """Cuts a stream's pieces into takes of a fixed size."""

    def __init__(self, pieces: Iterator[tuple[np.ndarray, np.ndarray]]):
        self.pieces = pieces
        self.shards = self.rows = np.zeros(0, dtype=np.int64)

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        while len(self.shards) < count:
            piece = next(self.pieces, None)
            if piece is None:
                break
            self.shards = np.concatenate([self.shards, piece[0]])
            self.rows = np.concatenate([self.rows, piece[1]])
        taken = self.shards[:count], self.rows[:count]
        self.shards, self.rows = self.shards[count:], self.rows[count:]
        return taken


def _largest_divisor(value: int, at_most: int) -> int:
    return max(d for d in range(1, min(value, at_most) + 1) if value % d == 0)
