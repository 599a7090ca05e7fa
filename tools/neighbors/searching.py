"""The k nearest neighbours of every sample: exact, by blocks of matrix products, or approximate by faiss.

Legend: n rows of a shard, k neighbours, D feature width. Vectors have length 1, so cosine distance is d²/2 of the
Euclidean one and both have the same neighbours. Equal distances are ordered by sample number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.neighbors.vectors import VectorReader
from lacuna.tools.passes.parts import fingerprint_of
from lacuna.trainer.neighbors import NONE

_QUERY_ROWS, _BASE_ROWS = 256, 8192  # of one matrix product: 8 MB of similarities, 23 MB of candidates at D = 2048
Arrays = Mapping[str, np.ndarray]


def sample_numbers(source: ShardSource) -> np.ndarray:
    """int64 [shards]: number of each shard's first sample, counted over all rows of all shards."""
    return np.concatenate([[0], np.cumsum(source.index.counts)[:-1]])


def features_print(source: ShardSource) -> list:
    """Names the vectors: an index knows its tars' sizes, not their content, but how they were made."""
    return [source.index.fingerprint, source.index.source]


@dataclass(frozen=True)
class SearchJob:
    """Parts with `ids` int64 [rows, k], `distances` float32 [rows, k] for all rows of a shard (NONE and infinite for
    those that do not take part), and `bad`, the number of unreadable rows. Labels play no part in it."""

    source: ShardSource
    k: int
    distance: str
    memory: int  # bytes of vectors that a worker keeps
    ivf: str | None = None  # faiss index file; None: exact

    @property
    def fingerprint(self) -> str:
        subset = self.source.subset.fingerprint if self.source.subset else None
        return fingerprint_of(job="search", features=features_print(self.source), subset=subset, k=self.k,
                              distance=self.distance, ivf=self.ivf is not None)

    def build(self) -> Callable[[int], Arrays]:
        torch.set_num_threads(1)
        reader = VectorReader(self.source, self.memory)
        starts = sample_numbers(self.source)
        if self.ivf is not None:
            from lacuna.tools.neighbors.approximate import IvfSearch

            search: Callable[[int], tuple[np.ndarray, np.ndarray]] = IvfSearch(self.ivf, reader, starts, self.k)
        else:
            shards = np.flatnonzero(self.source.counts).tolist()
            search = lambda shard: exact_search(reader, shard, shards, starts, self.k)  # noqa: E731

        def work(shard: int) -> Arrays:
            ids, euclidean = search(shard)
            distances = euclidean if self.distance == "euclidean" else euclidean**2 / 2
            found, rows = reader.shard(shard), int(self.source.index.counts[shard])
            all_ids, all_distances = np.full((rows, self.k), NONE), np.full((rows, self.k), np.inf, np.float32)
            all_ids[found.rows], all_distances[found.rows] = ids, distances
            return {"ids": all_ids, "distances": all_distances, "bad": np.array(found.bad)}

        return work


def exact_search(reader: VectorReader, shard: int, shards: list[int], starts: np.ndarray,
                 k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [n, k], Euclidean distances float32 [n, k]) of the rows of a shard among those of `shards`."""
    queries = reader.shard(shard)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    best = _Best(len(queries.rows), k, device)
    asked = torch.from_numpy(queries.matrix).to(device)
    own = torch.from_numpy(starts[shard] + queries.rows).to(device)
    for matrix, numbers in _blocks(reader, shards, starts):
        base, ids = torch.from_numpy(matrix).to(device), torch.from_numpy(numbers).to(device)
        for start in range(0, len(asked), _QUERY_ROWS):
            rows = slice(start, start + _QUERY_ROWS)
            best.offer(rows, *_candidates(asked[rows], own[rows], base, ids, k))
    return best.ids.cpu().numpy(), best.distances.cpu().numpy()


def _blocks(reader: VectorReader, shards: list[int], starts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(vectors, sample numbers) of all shards, _BASE_ROWS at a time: small shards together, large ones in pieces."""
    matrices, numbers, held = list[np.ndarray](), list[np.ndarray](), 0
    for shard in shards:
        vectors = reader.shard(shard)
        for first in range(0, len(vectors.rows), _BASE_ROWS):
            rows = slice(first, first + _BASE_ROWS)
            if held + len(vectors.rows[rows]) > _BASE_ROWS:
                yield np.concatenate(matrices), np.concatenate(numbers)
                matrices, numbers, held = [], [], 0
            matrices.append(vectors.matrix[rows])
            numbers.append(starts[shard] + vectors.rows[rows])
            held += len(matrices[-1])
    if held:
        yield np.concatenate(matrices), np.concatenate(numbers)


def _candidates(asked: torch.Tensor, own: torch.Tensor, base: torch.Tensor, ids: torch.Tensor,
                k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, distances) [q, ≤ k] of the nearest rows of one block; a sample itself is no one and infinitely far."""
    # One more, which may be the sample itself.
    places = (asked @ base.T).topk(min(k + 1, len(base)), dim=1).indices
    # Once more by differences: √(2 − 2·similarity) of near duplicates would have three digits.
    distances = (asked[:, None, :] - base[places]).square_().sum(2).sqrt_()
    found = ids[places]
    itself = found == own[:, None]
    return found.masked_fill_(itself, NONE), distances.masked_fill_(itself, torch.inf)


class _Best:
    """The k nearest so far."""

    def __init__(self, rows: int, k: int, device: torch.device):
        self.k = k
        self.ids = torch.full((rows, k), NONE, dtype=torch.int64, device=device)
        self.distances = torch.full((rows, k), torch.inf, device=device)

    def offer(self, rows: slice, ids: torch.Tensor, distances: torch.Tensor) -> None:
        ids, distances = torch.cat([self.ids[rows], ids], 1), torch.cat([self.distances[rows], distances], 1)
        order = ids.argsort(dim=1, stable=True)
        order = order.gather(1, distances.gather(1, order).argsort(dim=1, stable=True))[:, : self.k]
        self.ids[rows], self.distances[rows] = ids.gather(1, order), distances.gather(1, order)


