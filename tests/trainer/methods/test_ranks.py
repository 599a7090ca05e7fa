"""Losses and gradients over 2 and 3 gloo ranks, uneven and empty ones included, equal those of one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lacuna.data_pipelines.labels import UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs, Step
from lacuna.trainer.methods.top_entries import global_cutoff, global_top
from lacuna.trainer.world import World
from tests.helpers.loss_checks import random_case
from tests.helpers.method_steps import Model, Rows, images, method_of, take_step
from tests.helpers.oracles import batch_of, step_of, task_of

EPOCH, EPOCHS = 3, 10
# The batch-coupled ones first; the others must not depend on how a batch is split either.
METHODS = [
    {"name": "epr"},
    {"name": "ll_r", "delta_percent": 5.0},
    {"name": "ll_ct", "delta_percent": 3.0},
    {"name": "csl", "budget": "batch", "top": 2, "gamma_positive": 1},
    {"name": "csl", "budget": "batch", "top": 100},
    {"name": "csl", "top": 2, "clip": 0.05},
    {"name": "asl"}, {"name": "hill"}, {"name": "splc"}, {"name": "em"}, {"name": "gr"},
    {"name": "selection"}, {"name": "selection", "shown": "independent", "q": 0.3}, {"name": "softmax"},
    {"name": "ne"}, {"name": "wne"}, {"name": "fe"}, {"name": "ls", "temperature": 3.0},
]
# With a model, views, rows and a memory of their own; two steps, so that what the first one kept matters.
REMEMBERING = {
    "crisp": {}, "ll_cp": {"delta_percent": 5.0}, "ignore": {"first_epoch": 0, "momentum": 0.5}, "scpnet": {},
    "lac": {"contrast_phase": 0, "contrast_threshold": 0.6, "queue": 17},
    "gpr": {"threshold": 0.2, "regularizer": 0.5}, "mime": {}, "scob": {"contrast": 0.7},
}
SPLITS = {2: [(5, 7), (0, 12), (11, 1)], 3: [(3, 5, 4), (0, 12, 0), (1, 0, 11)]}


def case():
    """Logits in tenths, so that some tie."""
    a, z = random_case(21, (12, 10))
    return np.round(a, 1).astype(np.float32), z


def rank_loss(body, a, z, rows, step):
    """(this rank's part of the global loss, gradients as the loop and DeepSpeed make them)."""
    logits = torch.tensor(a[rows], requires_grad=True)
    method = build_method(body, replace(task_of(z), expected_positives=1.5))
    terms = method.loss(Outputs(logits), batch_of(z[rows]), step)
    share = terms.per_sample.sum() / step.samples
    coupled = torch.zeros(()) if terms.coupled is None else terms.coupled
    (step.world.size * share + coupled).backward()
    return (share + coupled / step.world.size).item(), logits.grad.numpy() / step.world.size


def remembered(name, z, rows, **where):
    """(this rank's parts of both losses, its part of the parameters' gradients, what the method keeps)."""
    method, model = method_of(name, z, **REMEMBERING[name]), Model(z.shape[1])
    if name == "crisp":
        method.priors = torch.linspace(0.1, 0.5, z.shape[1])
    if method.module():
        torch.manual_seed(2)
        method.projector.double().apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    rng = np.random.default_rng(4)
    tables = {"scores": rng.dirichlet(np.full(z.shape[1], 0.3), len(z)).astype(np.float16),
              "phi": rng.normal(0, 1, z.shape).astype(np.float32)}
    kept = Rows(method, z[rows], {field: table[rows] if len(rows) else table[:1] for field, table in tables.items()})
    views = tuple(images(len(z), seed)[rows] for seed in (7, 8))
    size, parts = where["world"].size if where else 1, []
    for epoch in (1, 2):
        terms = take_step(method, model(views[0]), z[rows], kept, model, views, epoch=epoch,
                          **({"samples": len(z), **where}))
        share = terms.per_sample.sum() / len(z)
        coupled = torch.zeros(()) if terms.coupled is None else terms.coupled
        (size * share + coupled).backward()
        parts.append((share + coupled / size).item())
        with torch.no_grad():
            model.head.bias += 0.3
    trained = [*model.parameters(), *(method.module().parameters() if method.module() else ())]
    gradients = torch.cat([p.grad.flatten() for p in trained]).numpy() / size
    return np.array(parts), gradients, {f"state_{k}": v.numpy() for k, v in method.state().items()}


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
        for name in REMEMBERING:
            parts, gradients, state = remembered(name, z, rows, world=world)
            np.savez(f"{folder}/{size}-{s}-{name}-{rank}.npz", parts=parts, gradients=gradients, **state)
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


@pytest.mark.parametrize("name", REMEMBERING)
def test_ranks_remember_as_one_process(name, folder):
    _, z = case()
    losses, gradients, state = remembered(name, z, np.arange(len(z)))
    assert np.abs(gradients).max() > 1e-6
    for size, splits in SPLITS.items():
        for s in range(len(splits)):
            parts = [np.load(folder / f"{size}-{s}-{name}-{rank}.npz") for rank in range(size)]
            np.testing.assert_allclose(sum(p["parts"] for p in parts), losses, rtol=1e-6)
            np.testing.assert_allclose(sum(p["gradients"] for p in parts), gradients, rtol=1e-5, atol=1e-8)
            for key, value in state.items():
                for part in parts:
                    np.testing.assert_allclose(part[key], value, rtol=1e-5, atol=1e-7, err_msg=f"{key} {splits[s]}")
