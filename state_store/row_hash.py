"""Stateless random numbers: a hash of (seed, tag, epoch, shard, row, column), equal on every rank and after a resume.

Legend: B rows of a batch, C columns of a field's flattened row.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from lacuna.basics.hashing import mix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def tag_key(seed: int, tag: str, epoch: int = 0) -> np.uint64:
    """One number for (seed, tag, epoch); the tag keeps fields and purposes apart."""
    digest = hashlib.blake2b(f"{seed}/{tag}/{epoch}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def row_keys(key: np.uint64, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """uint64 [B] for the samples (shard, row)."""
    within_shard = mix64(np.asarray(shards).astype(np.uint64) * _GOLDEN + key)
    return mix64(np.asarray(rows).astype(np.uint64) * _GOLDEN + within_shard)


def random_bits(keys: np.ndarray, columns: int) -> np.ndarray:
    """uint32 [B, C]: use the high bits (the low ones are less mixed).

    Row keys and column keys are each fully mixed, so one multiply-shift-multiply over the B × C grid is enough for
    rounding (the tests measure uniformity and neighbour correlation); a full finaliser would double the cost.
    """
    h = np.bitwise_xor((keys >> np.uint64(32)).astype(np.uint32)[:, None], _column_keys(columns)[None, :])
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    return h


def uniform(seed: int, tag: str, shard: int, rows: np.ndarray, columns: int, epoch: int = 0) -> np.ndarray:
    """float32 [B, C] in [0, 1) for rows of one shard: seeded initial values."""
    keys = row_keys(tag_key(seed, tag, epoch), np.full(len(rows), shard), rows)
    return (random_bits(keys, columns) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def tie_keys(key: np.uint64, samples: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """uint64 per (sample number, column) entry, distinct within a column because every step is a bijection of the
    sample number: ties are always broken, and the number chosen is exact by construction."""
    column = mix64(columns.astype(np.uint64) * _GOLDEN + key)
    return mix64(samples.astype(np.uint64) * _GOLDEN + column)


@lru_cache(maxsize=64)
def _column_keys(columns: int) -> np.ndarray:
    keys = (mix64(np.arange(1, columns + 1, dtype=np.uint64) * _GOLDEN) >> np.uint64(32)).astype(np.uint32)
    keys.flags.writeable = False
    return keys
