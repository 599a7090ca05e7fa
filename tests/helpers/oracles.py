"""What the method tests share: the golden batch, and a batch, task and step around plain arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods.base import Step, Task

LOGITS = [[2.0, -1.0, 0.5, -3.0], [-0.5, 1.5, -2.0, 0.0]]
OBSERVED = np.array([[1, -1, -1, -1], [-1, 1, -1, -1]], dtype=np.int8)
assert UNKNOWN == -1
assert POSITIVE == 1


def batch_of(labels: np.ndarray, **extra: Any) -> Batch:
    n = len(labels)
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(n, 1)
    fields = {"shards": np.zeros(n, np.int64), "rows": np.arange(n), "boxes": boxes,
              "flips": torch.zeros(n, dtype=torch.bool), "planned": np.zeros(n, np.int64), **extra}
    return Batch(torch.zeros(n, 1), torch.as_tensor(labels), **fields)


def task_of(labels: np.ndarray) -> Task:
    return Task(labels.shape[1], len(labels), (labels == POSITIVE).sum(0), (labels == NEGATIVE).sum(0),
                fully_annotated=not (labels == UNKNOWN).any())


def step_of(samples: int, epoch: int = 0, epochs: int = 1) -> Step:
    """One rank: what comes from all ranks is the rank's own."""
    alone: Any = SimpleNamespace(rank=0, size=1, global_sum=lambda value: value,
                                 all_gather=lambda value: value.detach()[None])
    return Step(alone, samples, epoch, epochs)
