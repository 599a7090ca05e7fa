"""One step of any method on given outputs: rows from the memory backend, further forwards by a small real model.

Legend: B batch, L classes, D channels, G grid side, S image side.
"""

from __future__ import annotations

import numpy as np
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.state_store import Given
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import METHODS
from lacuna.trainer.methods.base import LossTerms, Method, Outputs, Step, Task
from lacuna.trainer.state_rows import NO_ROWS, StateRows
from tests.helpers.oracles import batch_of, step_of
from tests.helpers.state.memory import MemoryStore

GRID, SIDE, WIDTH = 2, 8, 3


def task_for(labels: np.ndarray, **extra) -> Task:
    return Task(labels.shape[1], max(1, len(labels)), (labels == POSITIVE).sum(0), (labels == NEGATIVE).sum(0),
                not (labels == UNKNOWN).any(), grid=GRID, expected_positives=1.5, width=WIDTH, blank=(20, 30, 40),
                **extra)


def method_of(name: str, labels: np.ndarray, **settings) -> Method:
    """Without `scores` a method of tables keeps its fields in the run's own store, so that a test can fill them."""
    kind = METHODS[name]
    return kind(validated(kind.settings_type, {"name": name, **settings}, name), task_for(labels))


class Rows:
    """A method's rows of one batch, in memory; `tables` are first values of fields by name."""

    def __init__(self, method: Method, labels: np.ndarray, tables: dict[str, np.ndarray] | None = None):
        count, self.fields = max(1, len(labels)), method.fields()
        self.state: StateRows = NO_ROWS
        if not self.fields:
            return
        tables = tables or {}
        first = {f.name: (lambda _, name=f.name: tables[name] if name in tables
                          else method.initial_rows(name, labels if len(labels) else np.full((1, *labels.shape[1:]),
                                                                                            UNKNOWN, np.int8), 0))
                 for f in self.fields if isinstance(f.initial, Given)}
        store = MemoryStore([count], "x", self.fields)
        self.session = store.session(store.begin_launch(), initials=first)
        self.session.begin([0], 0)
        self.session.lease(0)
        self.state = StateRows(self.session.at(np.zeros(len(labels), np.int64), np.arange(len(labels))),
                               torch.device("cpu"))


class Model(torch.nn.Module):
    """Means of image patches as features, a linear head over cells: everything that methods of views ask for."""

    def __init__(self, classes: int, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.head = torch.nn.Linear(WIDTH, classes, dtype=dtype)

    def forward(self, images: torch.Tensor) -> Outputs:
        cells = images.to(self.head.weight.dtype) / 64 - 2
        size = SIDE // GRID
        features = cells.reshape(len(images), WIDTH, GRID, size, GRID, size).mean((3, 5))
        maps = self.head(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return Outputs(maps.mean((2, 3)), maps, features)


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))


def take_step(method: Method, outputs: Outputs, labels: np.ndarray, rows: Rows | None = None, forward=None,
              views: tuple[torch.Tensor, torch.Tensor] | None = None, **where) -> LossTerms:
    """`where`: epoch, epochs, phase, and for one of several ranks world and samples."""
    rows = rows or Rows(method, labels)
    alone = step_of(max(1, len(labels)), where.get("epoch", 0), where.get("epochs", 10))
    step = Step(where.get("world", alone.world), where.get("samples", alone.samples), alone.epoch, alone.epochs,
                where.get("phase", 0), 0, rows.state, *([forward] if forward else []))
    weak, strong = views or (images(len(labels), 7), images(len(labels), 8))
    batch = batch_of(labels, strong=strong)
    batch.inputs = weak
    terms = method.loss(outputs, batch, step)
    assert terms.per_sample.shape == (len(labels),)
    rows.state.write(terms.rows)
    return terms


def total(terms: LossTerms) -> torch.Tensor:
    value = terms.per_sample.sum() / max(1, len(terms.per_sample))
    return value if terms.coupled is None else value + terms.coupled
