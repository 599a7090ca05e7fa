"""Fields, shard sizes and naive oracles that the state-store tests share."""

from __future__ import annotations

import numpy as np

from lacuna.state_store import Constant, Draw, Field, Given

SEED = 4
COUNTS = [12, 9, 12, 7, 1, 11]
FIELDS = [
    Field("phi", (8,), "float16", Draw(-1, 1), stochastic=True),
    Field("moment", (8,), "float32"),
    Field("ema", (8,), "uint8", Given("third"), range=(0, 1), stochastic=True, histogram=True),
    Field("ids", (3,), "int16", Constant(-1)),
    Field("heat", (3, 4, 4), "uint8", Constant(0.5), range=(0, 1)),
    Field("seen", (11,), "bits"),
    Field("step", (), "int32"),
]
BY_NAME = {field.name: field for field in FIELDS}


def third(shard: int) -> np.ndarray:
    """A stand-in for initial scores made from labels."""
    return np.full((COUNTS[shard], 8), (shard % 4) / 3, np.float32)


INITIALS = {"ema": third}


def excluded(shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Every third row's column (shard % 8) is outside the ranking."""
    rows = np.arange(0, COUNTS[shard], 3)
    return rows, np.full(len(rows), shard % 8)


def initial_state(seed: int) -> dict[str, list[np.ndarray]]:
    """The dict model: stored rows of every field and shard, all in memory."""
    return {f.name: [np.array(f.initial_rows(seed, s, n, INITIALS.get(f.name))) for s, n in enumerate(COUNTS)]
            for f in FIELDS}


def random_stored(rng: np.random.Generator, field: Field, count: int) -> np.ndarray:
    shape = (count, *field.stored_shape)
    if field.stored_dtype.kind == "f":
        return rng.standard_normal(shape).astype(field.stored_dtype)
    limits = np.iinfo(field.stored_dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=field.stored_dtype, endpoint=True)


def naive_counts(shards: list[np.ndarray], outside=None) -> np.ndarray:
    """Histogram [columns, 256] of uint8 rows by looking at every entry."""
    total = np.zeros((shards[0].shape[1], 256), np.int64)
    for shard, rows in enumerate(shards):
        skip = set(zip(*(a.tolist() for a in outside(shard)), strict=True)) if outside else set()
        for row in range(len(rows)):
            for column in range(rows.shape[1]):
                if (row, column) not in skip:
                    total[column, rows[row, column]] += 1
    return total


def copied(state: dict[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
    return {name: [rows.copy() for rows in shards] for name, shards in state.items()}


def assert_same(session, state: dict[str, list[np.ndarray]]) -> None:
    for name, shards in state.items():
        for shard, rows in enumerate(shards):
            np.testing.assert_array_equal(session.read_shard(name, shard), rows, err_msg=f"{name} of shard {shard}")


def check_zarr(group, state) -> None:
    for name, shards in state.items():
        for shard, rows in enumerate(shards):
            np.testing.assert_array_equal(group[name][shard, : len(rows)], rows)
