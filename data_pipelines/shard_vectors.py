"""All vectors of an open feature shard, decoded once when it is opened: a batch is then a few copies of rows, not a
call per sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lacuna.data_pipelines.decode import DecodeError
from lacuna.data_pipelines.source import OpenShard

_MOST = 8 << 20  # bytes: several shards of every stream are open at a time


class ShardVectors:
    def __init__(self, opened: OpenShard, make: Callable, width: int):
        """`make(bytes, shard, row, views)`, as SampleMaker."""
        self.values = np.zeros((len(opened.members.keys), width), np.float32)
        self.bad: dict[int, DecodeError] = {}  # by row
        views = torch.from_numpy(self.values)[None]
        for row in opened.used.tolist():
            try:
                make(opened.read(row), opened.shard, row, views[:, row])
            except DecodeError as error:
                self.bad[row] = error

    @staticmethod
    def fit(opened: OpenShard, width: int) -> bool:
        """Larger shards are decoded sample by sample, as they are needed."""
        return len(opened.members.keys) * width * 4 <= _MOST
