"""Our access pattern on our store and on other people's: lease, gather, scatter, write back, snapshot; and a SIGKILL.

The others get what an engineer would write around them: shards are read ahead and written back by THREADS threads, and
batches are gathered from the shards in memory. Every scatter adds one to `heat_ids` and keeps the rest, so that stores
can be compared and a snapshot tells which epoch it is of.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from lacuna import state_store
from lacuna.basics.process_memory import peak_resident_bytes
from lacuna.state_store import Field
from lacuna.tools.bench.state import parts
from lacuna.tools.bench.state.stores import STORES, Shard

BATCH, OPEN_SHARDS = 256, 8
COUNTER = "heat_ids"


class Contender(Protocol):
    def epoch(self, schedule: parts.Schedule) -> None: ...

    def snapshot(self, name: str) -> None: ...

    def read(self, name: str | None) -> Callable[[int], Shard]:
        """By shard, as a new process would: a snapshot, or (None) what a launch without one would go on from."""
        ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, folder: str, fields: list[Field], shards: int, rows: int, content: Shard):
        self.folder, self.fields = folder, fields
        store = state_store.create(folder, [rows] * shards, "bench", fields)
        self.session = store.session(store.begin_launch(), budget=15 * store.schema.shard_bytes)
        self.session.begin(list(range(shards)), 0)
        for shard in range(shards):
            self.session.lease(shard)
            batch = self.session.at(np.full(rows, shard), np.arange(rows))
            for name, value in content.items():
                batch.scatter(name, value)
            self.session.release(shard)
        self.session.finish()

    def epoch(self, schedule: parts.Schedule) -> None:
        self.session.begin([shard for opened, *_ in schedule for shard in opened], 1)
        for opened, shards, rows, closed in schedule:
            for shard in opened:
                self.session.lease(shard)
            batch = self.session.at(shards, rows)
            values = {field.name: batch.gather(field.name) for field in self.fields}
            values[COUNTER] += 1
            for name, value in values.items():
                batch.scatter(name, value)
            for shard in closed:
                self.session.release(shard)
        for shard in np.flatnonzero(self.session.slots.slot_of >= 0).tolist():  # of a schedule that was cut short
            self.session.release(shard)
        self.session.finish()

    def snapshot(self, name: str) -> None:
        self.session.snapshot(name)

    def read(self, name: str | None) -> Callable[[int], Shard]:
        store = state_store.open(self.folder)
        reader = store.reader(name or store.snapshots()[-1].name)
        return lambda shard: {field.name: reader.read_shard(field.name, shard) for field in self.fields}

    def close(self) -> None:
        self.session.close()


class Theirs:
    def __init__(self, make: Callable[..., Any], folder: str, fields: list[Field], shards: int, rows: int,
                 content: Shard):
        self.store, self.fields = make(folder, fields, shards, rows), fields
        for shard in range(shards):
            self.store.write(shard, content)

    def epoch(self, schedule: parts.Schedule) -> None:
        order = [shard for opened, *_ in schedule for shard in opened]
        held: dict[int, Shard] = {}
        with ThreadPoolExecutor(parts.THREADS) as pool:
            ahead: dict[int, Future] = {}
            writes: list[Future] = []
            for opened, shards, rows, closed in schedule:
                for shard in opened:
                    place = order.index(shard)
                    for coming in order[place : place + 3]:
                        if coming not in ahead:
                            ahead[coming] = pool.submit(self.store.read, coming)
                    held[shard] = {k: v if v.flags.writeable else v.copy() for k, v in ahead[shard].result().items()}
                    ahead[shard] = Future()  # no longer held here
                self._update(held, shards, rows)
                writes += [pool.submit(self.store.write, shard, held.pop(shard)) for shard in closed]
            writes += [pool.submit(self.store.write, shard, values) for shard, values in held.items()]
            for write in writes:
                write.result()

    def _update(self, held: dict[int, Shard], shards: np.ndarray, rows: np.ndarray) -> None:
        places = {shard: np.flatnonzero(shards == shard) for shard in np.unique(shards).tolist()}
        for field in self.fields:
            values = np.empty((len(rows), *field.stored_shape), field.stored_dtype)
            for shard, at in places.items():
                values[at] = held[shard][field.name][rows[at]]
            if field.name == COUNTER:
                values += 1
            for shard, at in places.items():
                held[shard][field.name][rows[at]] = values[at]

    def snapshot(self, name: str) -> None:
        self.store.snapshot(name)

    def read(self, name: str | None) -> Callable[[int], Shard]:
        return self.store.reopened(name)

    def close(self) -> None:
        pass


def make(name: str, folder: str, width: int, shards: int, rows: int) -> Contender:
    fields, rng = parts.imagenet_fields(width), np.random.default_rng(0)
    content = {field.name: parts.plausible(rng, field, rows) for field in fields}
    content[COUNTER][:] = 0
    if name == "lacuna":
        return Ours(folder, fields, shards, rows, content)
    store: Any = STORES[name][1]
    return Theirs(store, folder, fields, shards, rows, content)


def crc(read: Callable[[int], Shard], shards: int) -> int:
    found = 0
    for shard in range(shards):
        for _, values in sorted(read(shard).items()):
            found = zlib.crc32(np.ascontiguousarray(values).tobytes(), found)
    return found


def bytes_on_disk(folder: str) -> int:
    """Of a folder and its snapshots, files with several names counted once."""
    files = {}
    for place in glob.glob(folder + "*"):
        for where, _, names in os.walk(place):
            for stat in (os.stat(os.path.join(where, name)) for name in names):
                files[stat.st_ino] = stat.st_blocks * 512
    return sum(files.values())


def killed(name: str, folder: str, width: int, shards: int, rows: int) -> dict[str, Any]:
    """A child makes an epoch and a snapshot and is killed in the next epoch: what a new process finds."""
    command = [sys.executable, "-c", f"from {__name__} import victim; victim()", name, folder,
               *map(str, (width, shards, rows))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        # icechunk writes warnings there, too
        facts = json.loads(next(line for line in child.stdout if line.startswith('{"peak"')))
        next(line for line in child.stdout if line == "second\n")  # most of an epoch is written, without a snapshot
        child.send_signal(signal.SIGKILL)
    found: dict[str, Any] = {"peak_mb": round(facts["peak"] / 1e6), "imports_mb": round(facts["imports"] / 1e6)}
    read = _existing(name, folder, width, shards, rows)
    found["snapshot_kept"] = crc(read("epoch-1"), shards) == facts["crc"]
    now = read(None)
    found["shards_ahead_of_snapshot"] = sum(bool((now(shard)[COUNTER] > 1).any()) for shard in range(shards))
    return found


def _existing(name: str, folder: str, width: int, shards: int, rows: int) -> Callable[[str | None], Any]:
    fields = parts.imagenet_fields(width)
    if name == "lacuna":
        ours = Ours.__new__(Ours)
        ours.folder, ours.fields = folder, fields
        return ours.read
    make_store: Any = STORES[name][1]
    return make_store(folder, fields, shards, rows).reopened


def victim() -> None:
    """The child's part."""
    name, folder = sys.argv[1:3]
    width, shards, rows = map(int, sys.argv[3:])
    imports = peak_resident_bytes()
    contender = make(name, folder, width, shards, rows)
    schedule = parts.staggered(shards, rows, min(OPEN_SHARDS, max(1, shards // 2)), min(BATCH, rows), seed=0)
    contender.epoch(schedule)
    contender.snapshot("epoch-1")
    peak = peak_resident_bytes()
    print(json.dumps({"peak": peak, "imports": imports, "crc": crc(contender.read("epoch-1"), shards)}), flush=True)
    contender.epoch(schedule[: len(schedule) * 3 // 4])
    print("second", flush=True)
    time.sleep(600)
