"""All vectors of an open feature shard, decoded once when it is opened: a batch is then a few copies of rows, not a
call per sample.

The usual shard has vectors of one type and one length: those are taken out of the tar's bytes together. A row that is
in any way unusual (another type, a number that is not finite, a name that does not match) is decoded alone, which also
says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lacuna.basics.npy_header import Layout, layout
from lacuna.data_pipelines.decode import DecodeError
from lacuna.data_pipelines.source import OpenShard

_MOST = 8 << 20  # bytes: several shards of every stream are open at a time


class ShardVectors:
    def __init__(self, opened: OpenShard, make: Callable, width: int):
        """`make(bytes, shard, row, views)`, as SampleMaker."""
        usual, rows = _usual(opened, width)
        self.bad: dict[int, DecodeError] = {}  # by row
        if usual is not None and len(rows) == len(opened.members.keys) and usual.dtype == np.float32:
            self.values = usual
            return
        self.values = np.zeros((len(opened.members.keys), width), np.float32)
        if usual is not None:
            self.values[rows] = usual
        views = torch.from_numpy(self.values)[None]
        for row in np.setdiff1d(opened.used, rows, assume_unique=True).tolist():
            try:
                make(opened.read(row), opened.shard, row, views[:, row])
            except DecodeError as error:
                self.bad[row] = error

    @staticmethod
    def fit(opened: OpenShard, width: int) -> bool:
        """Larger shards are decoded sample by sample, as they are needed."""
        return len(opened.members.keys) * width * 4 <= _MOST


def _usual(opened: OpenShard, width: int) -> tuple[np.ndarray | None, np.ndarray]:
    """(vectors [k, width] that are like the first one, their rows), taken out of the tar together."""
    rows, none = opened.used, (None, np.zeros(0, np.int64))
    if not len(rows) or opened.span(rows) > 4 * _MOST:  # tars that hold other things, too
        return none
    size = int(opened.members.sizes[rows[0]])
    rows = rows[opened.members.sizes[rows] == size]
    data, named = opened.read_together(rows, size)
    known = _layout_of_a_vector(data[0].tobytes(), width) if len(data) else None
    if known is None:
        return none
    vectors = data[:, known.start:].view(known.dtype)
    usual = named & (data[:, :known.start] == data[0, :known.start]).all(axis=1) & np.isfinite(vectors).all(axis=1)
    return (vectors, rows) if usual.all() else (vectors[usual], rows[usual])


def _layout_of_a_vector(data: bytes, width: int) -> Layout | None:
    try:
        known = layout(data)
    except Exception:  # whoever decodes it alone says what is wrong
        return None
    return known if known is not None and known.dtype.kind == "f" and known.shape == (width,) else None
