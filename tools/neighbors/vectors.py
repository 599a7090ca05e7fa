"""Feature vectors of a dataset, shard by shard, scaled to length 1; what does not fit into memory is read again.

Legend: n rows of a shard that take part and can be read, D feature width.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.npy_header import alone
from lacuna.data_pipelines.decode import DecodeError, decode_vector
from lacuna.data_pipelines.source import OpenShard, ShardSource

_MOST_BAD = 0.001  # of a dataset's rows, as in training


@dataclass(frozen=True)
class Vectors:
    """One shard's; `rows` are places in the tar."""

    matrix: np.ndarray  # float32 [n, D], rows of length 1 (or 0)
    rows: np.ndarray  # int64 [n]
    bad: int  # rows that take part, but cannot be read


class VectorReader:
    """Keeps the shards that were read last, up to `budget` bytes (but always one)."""

    def __init__(self, source: ShardSource, budget: int):
        if source.index.kind != "feature":
            raise UserError(f"{source.index.url} holds {source.index.kind}s, not features.")
        self.source, self.budget = source, budget
        self.width = source.feature_width
        self._kept: OrderedDict[int, Vectors] = OrderedDict()

    def shard(self, shard: int) -> Vectors:
        if shard in self._kept:
            self._kept.move_to_end(shard)
            return self._kept[shard]
        vectors = read_vectors(self.source, shard, self.width)
        self._kept[shard] = vectors
        while len(self._kept) > 1 and sum(v.matrix.nbytes for v in self._kept.values()) > self.budget:
            self._kept.popitem(last=False)
        return vectors


def read_vectors(source: ShardSource, shard: int, width: int) -> Vectors:
    opened = source.open(shard)
    try:
        matrix, good = _at_once(opened, width)
    except ValueError:  # members differ in form, or one is damaged: look at each
        matrix, good = _one_by_one(opened, width)
    lengths = np.sqrt(np.einsum("nd,nd->n", matrix, matrix, dtype=np.float64))
    matrix /= np.where(lengths == 0, 1, lengths)[:, None].astype(np.float32)
    return Vectors(matrix, opened.used[good], int((~good).sum()))


def _at_once(opened: OpenShard, width: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows by one view of the tar's bytes: vectors of one kind all start with the same .npy header."""
    data = [opened.read(int(row)) for row in opened.used]
    if not data:
        return np.zeros((0, width), np.float32), np.zeros(0, bool)
    stream = io.BytesIO(data[0])
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError("another version of .npy")
    shape, _, dtype = alone(lambda: np.lib.format.read_array_header_1_0(stream))
    start = stream.tell()
    if shape != (width,) or dtype.kind != "f" or any(len(d) != len(data[0]) or d[:start] != data[0][:start]
                                                     for d in data):
        raise ValueError("not all alike")
    matrix = np.frombuffer(b"".join(d[start:] for d in data), dtype).reshape(len(data), width).astype(np.float32)
    good = np.atleast_1d(np.isfinite(matrix).all(axis=1))
    return matrix[good], good


def _one_by_one(opened: OpenShard, width: int) -> tuple[np.ndarray, np.ndarray]:
    vectors, good = [], np.zeros(len(opened.used), bool)
    for place, row in enumerate(opened.used):
        try:
            vector = decode_vector(opened.read(int(row)))
        except DecodeError:
            continue
        if len(vector) == width:
            vectors.append(vector)
            good[place] = True
    return np.array(vectors, np.float32).reshape(len(vectors), width), good


def check_bad(bad: int, rows: int, url: str) -> None:
    """A few unreadable samples are nobody's neighbours; many are a mistake."""
    if bad > _MOST_BAD * rows:
        raise UserError(f"{url}: {bad:,} of {rows:,} vectors cannot be read (damaged, not finite, or of another "
                        "length than the first). Look at them with `lacuna shards check`, and make them again.")
