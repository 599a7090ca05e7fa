"""Approximate neighbours by faiss: an inverted-file index over all vectors, probed in a few of its lists.

faiss is an optional dependency (`pip install 'lacuna-trainer[faiss]'`). Its index holds all vectors in the memory of
whoever searches: N × D × 4 bytes. Distances to the neighbours found are exact to three or four digits.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.progress import progress
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.neighbors.searching import sample_numbers
from lacuna.tools.neighbors.vectors import VectorReader

_LISTS_PER_ROOT = 4  # lists = 4·√N, as faiss advises
_TRAINING_PER_LIST = 64
_PROBED = 32


def import_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise UserError("--search ivf needs faiss, which is not installed: pip install 'lacuna-trainer[faiss]' (or "
                        "faiss-cpu). --search exact works without it.") from None
    return faiss


def build_index(source: ShardSource, path: str, memory: int) -> None:
    """Train and fill the index shard by shard; the file appears whole."""
    faiss = import_faiss()
    reader = VectorReader(source, memory)
    starts, shards = sample_numbers(source), np.flatnonzero(source.counts).tolist()
    samples = int(source.counts.sum())
    lists = max(1, min(int(_LISTS_PER_ROOT * math.sqrt(samples)), samples // 39))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(reader.width), reader.width, lists, faiss.METRIC_INNER_PRODUCT)
    wanted, taken = lists * _TRAINING_PER_LIST, list[np.ndarray]()
    for shard in shards:  # shards are shuffled globally, so the first ones are a fair sample
        taken.append(reader.shard(shard).matrix)
        if sum(map(len, taken)) >= wanted:
            break
    index.train(np.concatenate(taken)[:wanted])
    del taken
    for shard in progress(shards, len(shards), "filling the faiss index", "shards"):
        vectors = reader.shard(shard)
        index.add_with_ids(vectors.matrix, starts[shard] + vectors.rows)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    faiss.write_index(index, path + ".partial")
    os.replace(path + ".partial", path)


class IvfSearch:
    """Called with a shard: (ids [n, k], Euclidean distances [n, k]) of its rows, as `exact_search`."""

    def __init__(self, path: str, reader: VectorReader, starts: np.ndarray, k: int):
        faiss = import_faiss()
        faiss.omp_set_num_threads(1)
        self.index = faiss.read_index(path, faiss.IO_FLAG_MMAP)
        self.index.nprobe = min(_PROBED, self.index.nlist)
        self.reader, self.starts, self.k = reader, starts, k

    def __call__(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        vectors = self.reader.shard(shard)
        similar, ids = self.index.search(vectors.matrix, self.k + 1)
        distances = np.sqrt(np.maximum(0, 2 - 2 * similar)).astype(np.float32)
        itself = ids == (self.starts[shard] + vectors.rows)[:, None]
        distances[itself | (ids < 0)] = np.inf
        ids = np.where(np.isinf(distances), -1, ids)
        order = np.lexsort((ids, distances), axis=1)[:, : self.k]
        return np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)
