"""Proves that predictions follow the averages of their groups as a naive loop has it: on ranks, in pieces, resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.groups import by_pattern, make_groups
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.grouping import with_groups
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs, Step
from lacuna.trainer.methods.grouped import Grouped, first_averages
from lacuna.trainer.world import World
from tests.helpers.launching import last_checkpoint
from tests.helpers.loss_checks import random_case
from tests.helpers.oracles import LOGITS, OBSERVED, batch_of, task_of
from tests.helpers.small_runs import STEPS, Trainer, body, make_data, outcome

SHARDS = [np.array([0, 1, 1, -1, 2, 0], np.int32), np.array([2, 1, -1, 1, 0, 0], np.int32)]
WEIGHT, RATE, COUNT = 0.7, 0.25, 3
SPLITS = {1: [12], 2: [5, 7], 3: [0, 11, 1]}


def case():
    a, z = random_case(3, (12, 4))
    return a.astype(np.float32), z


def averages(z: np.ndarray) -> torch.Tensor:
    rows, classes = np.nonzero(z == POSITIVE)
    return first_averages(COUNT, [(np.concatenate(SHARDS)[rows], classes)], z.shape[1], None, seed=5)


def steps_of(world: World, rows: np.ndarray, pieces: int = 1) -> tuple[list[float], np.ndarray, np.ndarray]:
    """(this rank's parts of three steps' losses, gradients of the last, averages)."""
    a, z = case()
    method = Grouped(build_method({"name": "an"}, task_of(z)), SHARDS, averages(z), WEIGHT, RATE)
    parts = []
    for number in range(3):
        step, part, gradients = Step(world, len(a), 0, 1, 0, number), 0.0, []
        for some in np.array_split(rows, pieces):
            logits = torch.tensor(a[some] + 0.3 * number, requires_grad=True)
            batch = batch_of(z[some], shards=some // 6, rows=some % 6)
            terms = method.loss(Outputs(logits), batch, step)
            share = terms.per_sample.sum() / len(a)
            share.backward()
            part += share.item()
            gradients.append(logits.grad.numpy())
        parts.append(part)
    return parts, np.concatenate(gradients), method.state()["groups.averages"].numpy()


def naive() -> tuple[list[float], np.ndarray]:
    a, z = case()
    kept, losses = averages(z).double().numpy(), []
    groups = np.concatenate(SHARDS)
    for number in range(3):
        logits = (a + np.float32(0.3 * number)).astype(np.float64)
        p = 1 / (1 + np.exp(-logits))
        loss, before = 0.0, kept.copy()
        for n in range(12):
            for c in range(4):
                target = z[n, c] == POSITIVE
                loss -= np.log((p[n, c] if target else 1 - p[n, c]) + 1e-5) / 48
                if groups[n] >= 0:
                    t = before[groups[n], c]
                    loss -= WEIGHT * (t * np.log(p[n, c]) + (1 - t) * np.log(1 - p[n, c])) / 48
        for g in range(COUNT):
            kept[g] = (1 - RATE) * before[g] + RATE * p[groups == g].mean(0)
        losses.append(loss)
    return losses, kept


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for size in (3, 2):
        if rank < size:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
            mine = np.split(np.arange(12), np.cumsum(SPLITS[size])[:-1])[rank]
            parts, _, kept = steps_of(World(torch.device("cpu"), 60), mine)
            np.savez(f"{folder}/{size}-{rank}.npz", parts=parts, kept=kept)
            dist.destroy_process_group()


@pytest.mark.parametrize("pieces", [1, 3])
def test_one_process(pieces):
    parts, gradient, kept = steps_of(World(torch.device("cpu")), np.arange(12), pieces)
    losses, expected = naive()
    np.testing.assert_allclose(parts, losses, rtol=1e-5)
    np.testing.assert_allclose(kept, expected, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3


def test_ranks_keep_the_same_averages(tmp_path):
    mp.spawn(work, (str(tmp_path),), nprocs=3)
    losses, _ = naive()
    _, _, alone = steps_of(World(torch.device("cpu")), np.arange(12))
    for size in (2, 3):
        parts = [np.load(tmp_path / f"{size}-{rank}.npz") for rank in range(size)]
        np.testing.assert_allclose(sum(part["parts"] for part in parts), losses, rtol=1e-5)
        for part in parts:
            np.testing.assert_array_equal(part["kept"], alone)  # bit for bit


def test_golden_values():
    """The batch of all golden values, both samples in one group that starts at ½."""
    method = Grouped(build_method({"name": "an"}, task_of(OBSERVED)), [np.zeros(2, np.int32)], torch.full((1, 4), 0.5),
                     1.0, 0.1)
    terms = method.loss(Outputs(torch.tensor(LOGITS)), batch_of(OBSERVED), Step(World(torch.device("cpu")), 2, 0, 1))
    assert terms.per_sample.sum().item() / 2 == pytest.approx(0.369787 + 0.963552, abs=1e-5)
    kept = method.state()["groups.averages"][0]
    np.testing.assert_allclose(kept, [0.512917, 0.504326, 0.487083, 0.477371], atol=1e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple:
    """A run with groups, and the same left inside an epoch and gone on with."""
    folder = tmp_path_factory.mktemp("grouped")
    make_data(folder)
    index = ShardIndex.load(str(folder / "train"))
    make_groups(index, "tens", by_pattern("^(.*).$"), {})
    trainer = Trainer()
    for name, leave in (("whole", None), ("left", STEPS // 2 + 1), ("left", None)):
        config = body(folder, name)
        config["data"]["train"]["groups"] = "tens"
        config["train"] |= {"group_weight": 0.5, "group_rate": 0.2}
        trainer.train(config, leave)
    return folder, trainer


def test_a_run_goes_on_exactly(runs):
    folder, _ = runs
    assert outcome(folder / "whole") == outcome(folder / "left")
    kept = [load_file(last_checkpoint(folder / name) / "method.safetensors")["groups.averages"]
            for name in ("whole", "left")]
    torch.testing.assert_close(kept[0], kept[1], atol=0, rtol=0)
    start = first_averages(len(kept[0]), [], kept[0].shape[1], None, 0)
    assert (kept[0] - start).abs().max() > 0.05


def test_what_it_needs(runs):
    folder, trainer = runs
    config = body(folder, "none")
    config["train"] |= {"group_weight": 0.5}
    with pytest.raises(UserError, match=r"train.group_weight = 0.5 needs data.train.groups"):
        trainer.train(config)
    config["data"]["train"]["groups"] = "hundreds"
    with pytest.raises(UserError, match=r"no groups named 'hundreds'; there are \['tens'\]"):
        trainer.train(config)


def test_known_positives_start_at_one(runs):
    folder, _ = runs
    source = ShardSource.load(str(folder / "train"), "single", None)
    config = body(folder, "first")
    config["data"]["train"]["groups"] = "tens"
    config["train"] |= {"group_weight": 0.5, "group_start": 0.1}
    method = build_method({"name": "an"}, task_of(np.zeros((1, 6), np.int8)))
    made = with_groups(method, parse_config(config, "test"), source)
    expected = np.full(made.averages.shape, 0.1, np.float32)
    for shard in range(len(source.index.shards)):
        dense = source.sidecar.labels(shard).dense(6)
        for row, key in enumerate(source.index.members(shard).keys):
            group = made.numbers[shard][row]
            assert (group >= 0) == bool(key)
            expected[group][dense[row] == POSITIVE] = 1
    np.testing.assert_array_equal(made.averages.numpy(), expected)
