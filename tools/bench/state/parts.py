"""The contenders of `lacuna bench state`: ImageNet-like data, the bare loop, staggered steps, and the memory probe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lacuna.basics.process_memory import peak_resident_bytes
from lacuna.state_store import Constant, Field
from lacuna.state_store.chunks import decode_into, encode
from lacuna.state_store.session import Session

THREADS = 2
Schedule = list[tuple[list[int], np.ndarray, np.ndarray, list[int]]]  # a step: opened, shards [B], rows [B], closed


def imagenet_fields(width: int = 1000, histogram: bool = False) -> list[Field]:
    return [
        Field("phi", (width,), "float16", Constant(-3), stochastic=True),
        Field("phi_m", (width,), "float32"),
        Field("phi_v", (width,), "float32"),
        Field("ema", (width,), "uint8", range=(0, 1), stochastic=True, histogram=histogram),
        Field("heat", (10, 14, 14), "uint8", range=(0, 1), stochastic=True),
        Field("heat_ids", (10,), "int16", Constant(-1)),
    ]


def plausible(rng: np.random.Generator, field: Field, rows: int) -> np.ndarray:
    """Values like those of a run: logits near −3, small moments, scores mostly 0..3 of 255, smooth heatmaps."""
    shape = (rows, *field.stored_shape)
    if field.name == "phi":
        return rng.normal(-3, 1, shape).astype(np.float16)
    if field.name.startswith("phi"):
        return rng.normal(0, 1e-3, shape).astype(np.float32)
    if field.name == "ema":
        return np.minimum(rng.exponential(1.5, shape), 255).astype(np.uint8)
    if field.name == "heat_ids":
        return rng.integers(0, 1000, shape).astype(np.int16)
    peak = rng.random((rows, 10, 1, 1)) * np.hanning(16)[1:-1, None] * np.hanning(16)[None, 1:-1]
    return (255 * peak).astype(np.uint8)


def fill(session: Session) -> None:
    """First write of every chunk (not timed: new pages and new files cost more than later ones)."""
    rng = np.random.default_rng(0)
    count = session.schema.max_rows
    content = {name: plausible(rng, field, count) for name, field in session.schema.fields.items()}
    shards = list(range(session.schema.shards))
    session.begin(shards, 0)
    for shard in shards:
        session.lease(shard)
        batch = session.at(np.full(count, shard), np.arange(count))
        for name, value in content.items():
            batch.scatter(name, np.roll(value, shard, axis=0))
        session.release(shard)
    session.finish()


def sequential_epoch(session: Session) -> None:
    """Lease, gather and scatter all rows of all fields in batches of 256, release; until all is written."""
    shards, count = list(range(session.schema.shards)), session.schema.max_rows
    session.begin(shards, 1)
    for shard in shards:
        session.lease(shard)
        for start in range(0, count, 256):
            rows = np.arange(start, min(start + 256, count))
            batch = session.at(np.full(len(rows), shard), rows)
            for name in session.schema.fields:
                batch.scatter(name, batch.gather(name))
        session.release(shard)
    session.finish()


class BareLoop:
    """The same chunks as plain files: read, decode, encode, write; same codec, same number of threads."""

    def __init__(self, folder: str, session: Session):
        os.makedirs(folder)
        self.session, self.tasks = session, []
        for name, field in session.schema.fields.items():
            for shard in range(session.schema.shards):
                path = f"{folder}/{name}-{shard}"
                with open(path, "wb") as f:
                    f.writelines(encode(field, session.read_shard(name, shard))[0])
                self.tasks.append((shard, field, path))
        self.tasks.sort(key=lambda task: task[0])

    def epoch(self) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._one, self.tasks))

    def different_chunks(self) -> int:
        """Chunks whose rows are not the store's, bit for bit."""
        return sum(self._read(*task).tobytes() != self.session.read_shard(task[1].name, task[0]).tobytes()
                   for task in self.tasks)

    def _one(self, task: tuple[int, Field, str]) -> None:
        rows = self._read(*task)
        with open(task[2], "wb") as f:
            f.writelines(encode(task[1], rows)[0])

    def _read(self, shard: int, field: Field, path: str) -> np.ndarray:
        with open(path, "rb") as f:
            data = f.read()
        rows = np.empty((self.session.schema.max_rows, *field.stored_shape), field.stored_dtype)
        decode_into(field, data, rows, None, path, shard)
        return rows


def different_histograms(session: Session) -> int:
    """Columns of the scores whose histogram, kept on the way, is not the count of the rows on disk."""
    base, change = session.histogram("ema")
    kept = base + change
    counted = np.zeros_like(kept)
    for shard in range(session.schema.shards):
        rows = session.read_shard("ema", shard)
        for column in range(rows.shape[1]):
            counted[column] += np.bincount(rows[:, column], minlength=counted.shape[1])
    return int((kept != counted).any(axis=1).sum())


def checksum(session: Session) -> int:
    """Of every stored row, read back from disk."""
    crc = 0
    for name in session.schema.fields:
        for shard in range(session.schema.shards):
            crc = zlib.crc32(session.read_shard(name, shard).tobytes(), crc)
    return crc


def staggered(shards: int, count: int, open_shards: int, batch: int, seed: int) -> Schedule:
    """Steps over `open_shards` shards at a time whose openings are spread evenly, as the epoch plan does."""
    rng = np.random.default_rng(seed)
    queue = [(shard, row) for shard in rng.permutation(shards).tolist() for row in range(count)]
    window, order = open_shards * count, np.arange(len(queue))
    # A row moves by at most half a window: about `open_shards` shards are in flight, and they start one by one.
    order = np.argsort(order + rng.random(len(queue)) * window, kind="stable")
    samples = np.array(queue)[order]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, shard in enumerate(samples[:, 0].tolist()):
        first.setdefault(shard, position)
        last[shard] = position
    steps: Schedule = []
    for start in range(0, len(samples), batch):
        stop = min(start + batch, len(samples))
        opened = [s for s, p in first.items() if start <= p < stop]
        closed = [s for s, p in last.items() if start <= p < stop]
        steps.append((opened, samples[start:stop, 0], samples[start:stop, 1], closed))
    return steps


def timed_steps(session: Session | None, schedule: Schedule, seconds: float, waiting: bool) -> float:
    """Mean seconds of a step of a device that computes `seconds`, with a session with the state of its batch.

    As in training on an accelerator, the host is one step ahead: it gathers the next rows and scatters the last ones
    while the device works. `waiting`: the host does nothing meanwhile, as where it computes itself.
    """
    if session is not None:
        session.begin([shard for opened, *_ in schedule for shard in opened], 1)
        time.sleep(0.5)  # reading ahead starts while the first data shards are opened
        steps = _StateSteps(session)
    started = free = time.perf_counter()
    for opened, shards, rows, closed in schedule:
        if session is not None:
            steps.gather(opened, shards, rows)
        begins = max(free, time.perf_counter())
        free = begins + seconds
        if waiting:
            time.sleep(seconds)
        if session is not None:
            steps.land(closed, at_once=waiting)
        time.sleep(max(0.0, begins - time.perf_counter()))
    time.sleep(max(0.0, free - time.perf_counter()))
    elapsed = time.perf_counter() - started
    if session is not None:
        steps.finish()
    return elapsed / len(schedule)


class _StateSteps:
    """The rows of a step and of the one before, in two sets of buffers (pinned memory in a real run)."""

    def __init__(self, session: Session):
        self.session, self.turn = session, 0
        self.buffers = [{name: np.empty((256, *field.stored_shape), field.stored_dtype)
                         for name, field in session.schema.fields.items()} for _ in range(2)]
        self.flying: list[tuple[Any, dict[str, np.ndarray], list[int]]] = []

    def gather(self, opened: list[int], shards: np.ndarray, rows: np.ndarray) -> None:
        for shard in opened:
            self.session.lease(shard)
        self.turn ^= 1
        self.batch = self.session.at(shards, rows)
        self.values = {name: self.batch.gather(name, out=buffer[: len(rows)])
                       for name, buffer in self.buffers[self.turn].items()}

    def land(self, closed: list[int], at_once: bool) -> None:
        self.flying.append((self.batch, self.values, closed))
        while len(self.flying) > (0 if at_once else 1):
            batch, values, done = self.flying.pop(0)
            for name, value in values.items():
                batch.scatter(name, value)
            for shard in done:
                self.session.release(shard)

    def finish(self) -> None:
        if self.flying:
            self.land([], at_once=True)  # the last step once more changes nothing
        for shard in np.flatnonzero(self.session.slots.slot_of >= 0).tolist():
            self.session.release(shard)
        self.session.finish()


def touch(session: Session, shards: Iterable[int]) -> None:
    """Change one value of every field in each shard."""
    order = list(shards)
    session.begin(order, 0)
    for shard in order:
        session.lease(shard)
        batch = session.at(np.array([shard]), np.array([0]))
        for name in session.schema.fields:
            batch.scatter(name, batch.gather(name))
        session.release(shard)


def bare_sync(folder: str, files: int) -> float:
    """Seconds that fsync of this many new small files costs here without a store."""
    os.makedirs(folder)
    paths = [f"{folder}/{i}" for i in range(files)]
    for path in paths:
        with open(path, "wb") as f:
            f.write(b"x" * 2000)
    started = time.perf_counter()

    def sync(some: Sequence[str]) -> None:
        for path in some:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(sync, [paths[i::8] for i in range(8)]))
    return time.perf_counter() - started


def peak_memory(folder: str, samples: int, rows: int, width: int, budget: int) -> dict[str, int]:
    """Bytes of RSS after imports and at the peak of one epoch, in a process of its own."""
    command = [sys.executable, "-m", "lacuna.tools.bench.state.parts", folder,
               *map(str, (samples, rows, width, budget))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _probe(folder: str, samples: int, rows: int, width: int, budget: int) -> None:
    from lacuna import state_store

    imports = peak_resident_bytes()
    fields = [f for f in imagenet_fields(width, histogram=True) if width == 1000 or not f.name.startswith("heat")]
    store = state_store.create(folder, [rows] * (samples // rows), "bench", fields)
    with store.session(store.begin_launch(), budget=budget) as session:
        fill(session)
        sequential_epoch(session)
        session.snapshot("end")
        peak = peak_resident_bytes()
        print(json.dumps({"imports": imports, "peak": peak, "chunks_written": session.metrics.chunks_written}))


if __name__ == "__main__":
    _probe(sys.argv[1], *map(int, sys.argv[2:]))
