"""Writes a neighbourhood (trainer/neighbors.py has its layout): the state store shard by shard, then what names it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping

import numpy as np
from fsspec.core import url_to_fs

from lacuna import state_store
from lacuna.basics import storage
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.neighbors import (
    DISTANCES_NAME,
    FACTS_NAME,
    MEDIANS_NAME,
    SNAPSHOT,
    STATE_NAME,
    Neighborhood,
    data_fingerprints,
    stored_fields,
)

_BUFFERED_SHARDS = 3


def write_neighborhood(url: str, source: ShardSource, k: int, slots: int, distance: str, medians: np.ndarray,
                       between: np.ndarray, shards: Iterable[tuple[int, Mapping[str, np.ndarray]]],
                       more: Mapping[str, object]) -> Neighborhood:
    """`shards`: (number, rows of every stored field); shards without samples may be left out."""
    storage.remove([storage.join(url, FACTS_NAME)])
    digest = _write_array(storage.join(url, DISTANCES_NAME), between.astype(np.float32))
    _write_array(storage.join(url, MEDIANS_NAME), medians.astype(np.float32))
    made = Neighborhood(url, k, slots, source.classes, distance, data_fingerprints(source), digest)
    _write_state(storage.join(url, STATE_NAME), source, made, shards)
    made.save(more)
    return made


def _write_array(url: str, array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    storage.write_atomic(url, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _write_state(url: str, source: ShardSource, made: Neighborhood,
                 shards: Iterable[tuple[int, Mapping[str, np.ndarray]]]) -> None:
    if storage.exists(url):  # of a run that did not come to its end, or that is replaced
        fs, path = url_to_fs(url)
        fs.rm(path, recursive=True)
    fields = stored_fields(made.k, made.slots)
    store = state_store.create(url, source.index.counts, "-".join(made.data.values()), fields)
    budget = _BUFFERED_SHARDS * sum(field.row_bytes for field in fields) * int(source.index.counts.max())
    with store.session(store.begin_launch(), budget=budget) as session:
        session.begin([], 0)
        for shard, rows in shards:
            session.lease(shard)
            places = np.arange(int(source.index.counts[shard]))
            at = session.at(np.full(len(places), shard), places)
            for field in fields:
                at.write(field.name, rows[field.name])
            session.release(shard)
        session.finish()
        session.snapshot(SNAPSHOT)
