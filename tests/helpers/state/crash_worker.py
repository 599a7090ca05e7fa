"""The process that crash tests kill: trains deterministic steps on a store, one snapshot a step, keeping two.

Run as: python crash_worker.py URL STEPS. Step k changes the state as `apply(state, k)` does to the dict model, so
whatever was killed and resumed, snapshot "s<k>" must equal the model after step k.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from lacuna import state_store
from lacuna.state_store.schema import is_store
from tests.helpers.state.samples import COUNTS, FIELDS, INITIALS, random_stored

SEED = 11


def changes(step: int):
    """(field, shards, rows, stored rows) of a step, over three shards."""
    rng = np.random.default_rng(step)
    shards = [int(s) for s in (step + np.arange(3)) % len(COUNTS)]
    for shard in shards:
        rows = rng.permutation(COUNTS[shard])[: max(1, COUNTS[shard] // 2)]
        for field in FIELDS:
            yield shard, field.name, rows, random_stored(rng, field, len(rows))


def apply(state: dict, step: int) -> None:
    for shard, field, rows, stored in changes(step):
        state[field][shard][rows] = stored


def open_or_create(url: str) -> state_store.StateStore:
    if is_store(url):
        return state_store.open(url, COUNTS, "index", FIELDS, SEED)
    return state_store.create(url, COUNTS, "index", FIELDS, SEED)


def main(url: str, steps: int) -> None:
    store = open_or_create(url)
    launch = store.begin_launch()
    done = store.snapshots()
    with store.session(launch, budget=6_000, initials=INITIALS, snapshot=done[-1].name if done else None) as session:
        first = done[-1].meta["step"] + 1 if done else 0
        for step in range(first, first + steps):
            last = None
            for shard, field, rows, stored in changes(step):
                if shard != last:
                    if last is not None:
                        session.release(last)
                    session.lease(shard)
                    last = shard
                session.scatter(field, np.full(len(rows), shard), rows, stored)
            session.snapshot(f"s{step}", {"step": step})
            session.release(last)
            session.collect([e.name for e in store.snapshots()][-2:])
            print(step, flush=True)


if __name__ == "__main__":
    # A shell starts background jobs with Ctrl-C ignored, which children inherit: the test sends it on purpose.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1], int(sys.argv[2]))
    # Interpreter shutdown is not part of what is tested.
    sys.stdout.flush()
    os._exit(0)
