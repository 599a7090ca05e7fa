"""Losses and gradients over 2 and 3 gloo ranks, uneven and empty ones included, equal those of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loss_checks import random_case
from oracles import batch_of, step_of, task_of

from data_pipelines.labels import UNKNOWN
from trainer.methods import build_method
from trainer.methods.base import Outputs, Step
from trainer.methods.top_entries import global_cutoff, global_top
from trainer.world import World

EPOCH, EPOCHS = 3, 10
# The batch-coupled ones first; the others must not depend on how a batch is split either.
METHODS = [
    {"name": "epr", "expected_positives": 1.5},
    {"name": "ll_r", "delta_percent": 5.0},
    {"name": "ll_ct", "delta_percent": 3.0},
    {"name": "csl", "budget": "batch", "top": 2, "gamma_positive": 1},
    {"name": "csl", "budget": "batch", "top": 100},
    {"name": "csl", "top": 2, "clip": 0.05},
    {"name": "asl"}, {"name": "hill"}, {"name": "splc"}, {"name": "em"}, {"name": "gr"},
    {"name": "ne"}, {"name": "wne"}, {"name": "fe"}, {"name": "ls", "temperature": 3.0},
]
SPLITS = {2: [(5, 7), (0, 12), (11, 1)], 3: [(3, 5, 4), (0, 12, 0), (1, 0, 11)]}


def case():
    """Logits in tenths, so that some tie."""
    a, z = random_case(21, (12, 10))
    return np.round(a, 1).astype(np.float32), z


def rank_loss(body, a, z, rows, step):
    """(this rank's part of the global loss, gradients as the loop and DeepSpeed make them)."""
    logits = torch.tensor(a[rows], requires_grad=True)
    terms = build_method(body, task_of(z)).loss(Outputs(logits), batch_of(z[rows]), step)
    share = terms.per_sample.sum() / step.samples
    coupled = torch.zeros(()) if terms.coupled is None else terms.coupled
    (step.world.size * share + coupled).backward()
    return (share + coupled / step.world.size).item(), logits.grad.numpy() / step.world.size


def work(rank, folder):
    """A world of three, and then its first two ranks as a world of two: starting processes is what takes time."""
    torch.set_num_threads(1)
    for size in sorted(SPLITS, reverse=True):
        if rank < size:
            work_among(size, rank, folder)


def work_among(size, rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
    world = World(torch.device("cpu"), 60)
    a, z = case()
    for s, counts in enumerate(SPLITS[size]):
        rows = np.split(np.arange(len(a)), np.cumsum(counts)[:-1])[rank]
        for m, body in enumerate(METHODS):
            part, gradient = rank_loss(body, a, z, rows, Step(world, len(a), EPOCH, EPOCHS))
            np.savez(f"{folder}/{size}-{s}-{m}-{rank}.npz", part=part, gradient=gradient)
        values = torch.tensor(a[rows])
        for k in (1, 7, 60, 120):
            assert global_cutoff(values, k, world) == torch.tensor(a).flatten().sort(descending=True).values[k - 1]
            places, chosen = global_top(torch.round(values), k, world)
            assert len(set(places[chosen].tolist())) == int(chosen.sum())
            assert world.sum_counts(int(chosen.sum()))[0] == k
        assert global_cutoff(values, 121, world) == -torch.inf
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder),), nprocs=max(SPLITS))
    return folder


@pytest.mark.parametrize("size", SPLITS)
def test_ranks_equal_one_process(size, folder):
    a, z = case()
    assert (z == UNKNOWN).sum() > 24
    for m, body in enumerate(METHODS):
        loss, gradient = rank_loss(body, a, z, np.arange(len(a)), step_of(len(a), EPOCH, EPOCHS))
        for s in range(len(SPLITS[size])):
            parts = [np.load(folder / f"{size}-{s}-{m}-{rank}.npz") for rank in range(size)]
            assert sum(float(p["part"]) for p in parts) == pytest.approx(loss, rel=1e-5), (body, SPLITS[size][s])
            together = np.concatenate([p["gradient"] for p in parts])
            # Which of several tied entries is ignored may differ, not how many: compare gradients as sets.
            np.testing.assert_allclose(np.sort(together, axis=None), np.sort(gradient, axis=None), rtol=2e-5,
                                       atol=1e-7, err_msg=f"{body}, {SPLITS[size][s]}")
            if body.get("budget") != "batch":
                np.testing.assert_allclose(together, gradient, rtol=2e-5, atol=1e-7)
