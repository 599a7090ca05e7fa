"""Drives a method over a real store as the loop does, with given logits instead of a model; ROLE's loss by formula."""

from __future__ import annotations

import numpy as np
import torch

from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.index import SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.readers import digits
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import EpochStart, Outputs, Scored, Step, Task
from lacuna.trainer.neighbors import data_fingerprints
from lacuna.trainer.sample_state import SampleState
from lacuna.trainer.world import World

SAMPLES, CLASSES, BATCH = 240, 10, 16


def make_source(url: str) -> ShardSource:
    """240 samples in 8 shards with ternary labels: one positive each, a few verified negatives."""
    index = pack(digits.read(SAMPLES), url, Layout(streams=1, rows_per_shard=30), workers=1)
    rng = np.random.default_rng(0)
    writer = SidecarWriter(index, "partial", UNKNOWN, {})
    for shard in range(len(index.shards)):
        count = index.shards[shard].count
        dense = np.where(rng.random((count, CLASSES)) < 0.1, NEGATIVE, UNKNOWN).astype(np.int8)
        dense[np.arange(count), rng.integers(0, CLASSES, count)] = POSITIVE
        writer.write(shard, SparseLabels.from_dense(dense))
    writer.close()
    return ShardSource.load(url, "partial", None)


def labels_of(source: ShardSource) -> np.ndarray:
    return np.concatenate([source.sidecar.labels(s).dense(CLASSES) for s in range(len(source.index.shards))])


def logits_at(epoch: int, samples: np.ndarray) -> torch.Tensor:
    """A stand-in for a model whose outputs drift over epochs; depends on the sample only."""
    rng = np.random.default_rng(epoch)
    table = rng.normal(-1, 2, (SAMPLES, CLASSES)).astype(np.float32)
    return torch.from_numpy(table[samples])


def pass_logits(epoch: int, samples: np.ndarray) -> torch.Tensor:
    """What a pass before the epoch sees: within a class all different, also after rounding to 1/512."""
    ranks = np.random.default_rng(100 + epoch).permuted(np.tile(np.arange(SAMPLES), (CLASSES, 1)), axis=1)
    return torch.from_numpy((ranks.T[samples] / SAMPLES * 8 - 6).astype(np.float32))


class Harness:
    """Drives a method over the store as the loop does, with given logits instead of a model."""

    def __init__(self, source, folder, body, grid=0, budget_shards=3, k=None):
        self.source, self.world = source, World(torch.device("cpu"))
        sidecar = source.sidecar
        self.task = Task(CLASSES, SAMPLES, sidecar.positives, sidecar.negatives, False, grid, k, 7,
                         data=data_fingerprints(source))
        self.method = build_method(body, self.task)
        self.first = np.concatenate([[0], np.cumsum(source.index.counts)])
        row = sum(f.row_bytes for f in self.method.fields())
        # Room for a few shards only, so that state is evicted and read again.
        budget = int(row * 30 * budget_shards * 2.2)
        self.state = SampleState(str(folder), self.method, source, self.world, budget, 7, None)
        self.number = 0

    def epoch(self, epoch: int, on_step=None, maps=None, phase: int = 0) -> None:
        plan = EpochPlan(self.source.counts, 5, epoch, 1, BATCH, 2)
        self.method.begin_epoch(EpochStart(phase, epoch, 9, epoch, self.world, self.state,
                                           scored=lambda: self.scored(plan, epoch)))
        self.state.begin_epoch(plan, 0, epoch)
        for shards, rows in plan.batches(range(1)):
            samples = self.first[shards] + rows
            batch = self.batch(shards, rows, samples, epoch)
            with self.state.step(batch) as held:
                step = Step(self.world, len(rows), epoch, 9, phase, self.number, held)
                outputs = Outputs(logits_at(epoch, samples), None if maps is None else maps(epoch, samples))
                terms = self.method.loss(outputs, batch, step)
                if on_step:
                    on_step(samples, batch, outputs, step, terms)
                held.write(terms.rows)
            self.number += 1
        self.state.end_epoch()

    def scored(self, plan, epoch):
        """A pass in evaluation mode with the logits of `pass_logits`."""
        self.state.begin_epoch(plan, 0, epoch)
        for shards, rows in plan.batches(range(1)):
            samples = self.first[shards] + rows
            batch = self.batch(shards, rows, samples, epoch)
            with self.state.step(batch) as held:
                yield Scored(batch, Outputs(pass_logits(epoch, samples)), held)
        self.state.end_epoch()

    def batch(self, shards, rows, samples, epoch) -> Batch:
        rng = np.random.default_rng([epoch, int(samples[0])])
        size = rng.uniform(0.5, 1.0, (len(rows), 2))
        corner = rng.uniform(0, 1, size.shape) * (1 - size)
        boxes = torch.from_numpy(np.concatenate([corner, corner + size], 1).astype(np.float32))
        labels = torch.from_numpy(labels_of(self.source)[samples])
        flips = torch.from_numpy(rng.random(len(rows)) < 0.5)
        return Batch(torch.zeros(len(rows), 1), labels, shards, rows, boxes, flips, shards)

    def table(self, field: str) -> np.ndarray:
        """The whole field as floats, from the store."""
        spec = self.state.store.schema.fields[field]
        return np.concatenate([spec.decode(self.state.session.read_shard(field, s))
                               for s in range(len(self.source.index.shards))])


def role_loss(phi, logits, z, k):
    """The paper's loss of a batch, by formula, in float64; gradients by autograd."""
    nl = lambda x: -torch.log(x + 1e-5)  # noqa: E731
    p, y = torch.sigmoid(logits), torch.sigmoid(phi)
    pos, neg = (z == POSITIVE).double(), (z == NEGATIVE).double()

    def side(own, other):
        other = other.detach()
        known = pos * nl(own) + neg * nl(1 - own)
        return known + other * nl(own) + (1 - other) * nl(1 - own)

    count, classes = p.shape
    main = (side(p, y) + side(y, p)).sum() / (2 * count * classes)
    return main + ((p.sum(1).mean() - k) ** 2 + (y.sum(1).mean() - k) ** 2) / (2 * classes**2)


def maps_at(grid):
    def maps(epoch, samples):
        rng = np.random.default_rng(100 + epoch)
        table = rng.normal(0, 1, (SAMPLES, CLASSES, grid, grid)).astype(np.float32)
        return torch.from_numpy(table[samples])
    return maps
