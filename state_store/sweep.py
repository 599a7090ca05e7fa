"""Sweeps over all rows without holding them: shards are read by a few threads, a bounded number ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np

from lacuna.state_store.schema import Schema

T = TypeVar("T")


class Reader(Protocol):
    """A session between epochs, or a snapshot's reader."""

    @property
    def schema(self) -> Schema: ...
    def read_shard(self, field: str, shard: int) -> np.ndarray: ...


class Exchange(Protocol):
    """How ranks add up and share small arrays; the trainer implements it with torch.distributed."""

    def sum(self, array: np.ndarray) -> np.ndarray: ...
    def gather(self, array: np.ndarray) -> list[np.ndarray]: ...


class Alone:
    """The exchange of a single process."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        return array

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        return [array]


def map_shards(reader: Reader, fields: Iterable[str], function: Callable[[int, dict[str, np.ndarray]], T],
               shards: Iterable[int] | None = None, threads: int = 2) -> Iterator[T]:
    """function(shard, {field: stored rows}) of every shard, in order; `threads` shards are worked on at a time."""
    names = list(fields)

    def work(shard: int) -> T:
        return function(shard, {name: reader.read_shard(name, shard) for name in names})

    todo = iter(range(reader.schema.shards) if shards is None else shards)
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[T]] = deque()
        try:
            for shard in todo:
                running.append(pool.submit(work, shard))
                if len(running) > threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:  # the caller stopped early, or a shard failed: do not read the rest
            for future in running:
                future.cancel()
