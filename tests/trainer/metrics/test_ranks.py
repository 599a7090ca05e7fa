"""Proves that 2 and 3 gloo ranks, uneven and empty ones included, all return the bits of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.metrics.collector import ScoreCollector
from lacuna.trainer.metrics.exchange import Peers

# name → (classes, rows of every rank, share of unknown entries, decimals of the scores)
CASES = {
    "dense, uneven": (83, (50, 7, 21), 0.0, 1),
    "dense with unknown": (40, (30, 30, 5), 0.3, None),
    "first rank empty": (37, (0, 40, 3), 0.1, 1),
    "last ranks empty": (5, (60, 0, 0), 0.0, 0),
    "sparse, uneven": (211, (40, 3, 0), 0.97, 0),
    "fewer classes than ranks": (1, (9, 8, 7), 0.2, 1),
    "nobody has rows": (6, (0, 0, 0), 0.0, None),
}


def make_case(name, world):
    classes, counts, unknown, decimals = CASES[name]
    counts = [*counts[: world - 1], sum(counts[world - 1 :])]
    rng = np.random.default_rng(sum(name.encode()))
    rows = sum(counts)
    scores = rng.standard_normal((rows, classes))
    scores = (scores if decimals is None else np.round(scores, decimals)).astype(np.float32)
    targets = rng.choice([POSITIVE, NEGATIVE, UNKNOWN], size=(rows, classes),
                         p=[0.2 * (1 - unknown), 0.8 * (1 - unknown), unknown]).astype(np.int8)
    # Which sample a rank holds is arbitrary: ordinals say where it belongs.
    return scores, targets, np.split(rng.permutation(rows), np.cumsum(counts)[:-1])


def collect(scores, targets, samples, sparse=None):
    collector = ScoreCollector(scores.shape[1])
    if len(samples):
        collector.sparse = sparse
    for part in np.array_split(samples, 3):
        collector.add(scores[part], targets[part], ordinals=part)
    return collector


def work(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    for name in CASES:
        scores, targets, shares = make_case(name, world)
        for mode, sparse in {"chosen": None, "mixed": rank % 2 == 0}.items():
            result = collect(scores, targets, shares[rank], sparse).result()
            assert result.count == len(scores)
            np.save(f"{folder}/{name}-{mode}-{rank}.npy", result.classes.to_matrix())
        collector = collect(scores, targets, shares[rank])
        np.save(f"{folder}/{name}-rows-{rank}.npy",
                collector.result(rows=collector.row_positives() > 1).classes.to_matrix())
    assert Peers().sum(np.array([rank + 1, 10])).tolist() == [world * (world + 1) // 2, 10 * world]
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_return_what_one_process_returns(world, tmp_path):
    mp.spawn(work, (world, str(tmp_path)), nprocs=world)
    for name in CASES:
        scores, targets, _ = make_case(name, world)
        single = collect(scores, targets, np.arange(len(scores)))
        some = single.row_positives() > 1
        for mode in ("chosen", "mixed", "rows"):
            expected = single.result(rows=some if mode == "rows" else None).classes.to_matrix()
            for rank in range(world):
                found = np.load(tmp_path / f"{name}-{mode}-{rank}.npy")
                np.testing.assert_array_equal(found, expected, err_msg=f"{name}, {mode}, rank {rank}")
