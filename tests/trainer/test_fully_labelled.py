"""train.fully_labelled_weight: equal to a plain loop, main stream untouched, resume, 1 = 2 ranks, accumulation."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.decode import decode_vector
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.repeated import RepeatedOrder, Rows
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.trainer.assemble import build_run
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.fully_labelled import FullyLabelled
from tests.helpers.launching import Launch, losses, trace, weights
from tests.helpers.small_runs import BATCH, EPOCHS, Trainer, body, make_data, outcome

WEIGHT, LR, FULL = 0.5, 0.5, 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The small runs' data, with a subset of 11 rows of train."""
    folder = tmp_path_factory.mktemp("full")
    make_data(folder)
    index = ShardIndex.load(str(folder / "train"))
    chosen = np.random.RandomState(0).permutation(int(index.counts.sum())) < FULL
    Subset.from_masks(index, "full", np.split(chosen, np.cumsum(index.counts)[:-1]), {}).save()
    return folder


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


def config(folder: Path, name: str, method: str = "an", weight: float = WEIGHT, **train) -> dict:
    made = body(folder, name)
    made["data"]["fully_labelled"] = {"url": str(folder / "train"), "subset": "full"}
    made["method"] = {"name": method}
    made["phases"][0] |= {"optimizer": "sgd", "lr": LR, "momentum": 0.0}
    made["train"] |= {"fully_labelled_weight": weight, "trace_samples": True, **train}
    return made


@pytest.fixture(scope="module")
def reference(folder, trainer) -> Path:
    trainer.train(config(folder, "reference"))
    return folder / "reference"


def test_every_pass_is_a_permutation_of_its_own_and_ranks_share_each_step():
    order = RepeatedOrder(11, 4, 5)
    steps = [order.step(step, 0, 1) for step in range(22)]
    passes, ordinals = (np.concatenate(part) for part in zip(*steps, strict=True))
    np.testing.assert_array_equal(passes, np.repeat(np.arange(8), 11))
    rounds = ordinals.reshape(8, 11)
    assert all(sorted(one) == list(range(11)) for one in rounds.tolist())
    assert len({tuple(one) for one in rounds.tolist()}) == 8
    for step, whole in enumerate(steps):
        for world in (2, 3):
            parts = [order.step(step, rank, world) for rank in range(world)]
            np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), whole[1])


def test_rows_are_those_of_the_subset_with_their_complete_labels(folder):
    source = ShardSource.load(str(folder / "train"), "labels", "full")
    expected = [(shard, int(row), source.sidecar.labels(shard).dense(source.classes)[row].tolist())
                for shard in range(len(source.counts)) for row in np.flatnonzero(source.subset.mask(shard))]
    rows = Rows(source)
    for _ in range(2):  # read, then remembered
        found = [rows.read(ordinal) for ordinal in range(FULL)]
        assert [(sample.shard, sample.row, sample.labels.tolist()) for sample in found] == expected


def test_a_plain_loop_ends_with_the_same_weights(folder, trainer, reference):
    """Its batches are those of the trace, its further samples those of the order."""
    run = build_run(parse_config(config(folder, "start"), "test"), trainer.world, trainer.watchdog)
    weight, bias = (run.model.head.weight.detach().clone().requires_grad_(),
                    run.model.head.bias.detach().clone().requires_grad_())
    batch = FullyLabelled(run, 0).batch
    assert batch == BATCH // 4
    run.run_log.close()
    truth: list[np.ndarray] = []
    single: list[np.ndarray] = []
    for labels, rows in (("labels", truth), ("single", single)):
        source = ShardSource.load(str(folder / "train"), labels, None)
        rows += [source.sidecar.labels(s).dense(source.classes) == POSITIVE for s in range(len(source.counts))]
    keys = [(s, r) for s, part in enumerate(truth) for r in range(len(part))]
    source = ShardSource.load(str(folder / "train"), "labels", None)
    features = {key: torch.from_numpy(decode_vector(source.open(key[0]).read(key[1])).copy()) for key in keys}
    targets = [{key: torch.from_numpy(part[key[0]][key[1]].astype(np.float32)) for key in keys}
               for part in (single, truth)]
    subset = ShardSource.load(str(folder / "train"), "labels", "full").subset
    full = [key for key in keys if subset.mask(key[0])[key[1]]]

    def loss(samples, wanted, inside):  # AN as Cole et al. have it: log(p + 1e-5)
        logits = torch.stack([features[key] for key in samples]) @ weight.T + bias
        right = torch.where(torch.stack([wanted[key] for key in samples]) > 0, logits, -logits)
        return -torch.log(torch.sigmoid(right) + inside).mean()

    batches, expected = trace(reference), []
    per_epoch = len(batches) // EPOCHS
    for step in range(len(batches)):
        epoch, within = divmod(step, per_epoch)
        order = RepeatedOrder(FULL, batch, mix(0, 0, 7, epoch)).step(within, 0, 1)[1]
        total = loss([tuple(key) for key in batches[step + 1]], targets[0], 1e-5)
        total = total + WEIGHT * loss([full[ordinal] for ordinal in order], targets[1], 0.0)
        expected.append(total.item())
        gradients = torch.autograd.grad(total, (weight, bias))
        with torch.no_grad():
            weight -= LR * gradients[0]
            bias -= LR * gradients[1]
    np.testing.assert_allclose(losses(reference), expected, rtol=1e-5)
    torch.testing.assert_close(weights(reference)["head.weight"], weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(reference)["head.bias"], bias.detach(), rtol=1e-4, atol=1e-5)


def test_the_main_stream_does_not_know_of_them(folder, trainer, reference):
    trainer.train(config(folder, "without", weight=0.0))
    assert trace(folder / "without") == trace(reference)
    assert losses(folder / "without")[0] < losses(reference)[0]


@pytest.mark.parametrize("method", ["en", "softmax"])
def test_killed_and_resumed_is_never_killed(folder, trainer, method):
    """In the middle of an epoch, between checkpoints; EN has state, softmax a loss of its own for complete labels."""
    for name, leave in (("whole", None), ("killed", 6), ("killed", 11), ("killed", None)):
        trainer.train(config(folder, f"{name}-{method}", method), leave)
    if method == "en":
        assert outcome(folder / f"whole-{method}") == outcome(folder / f"killed-{method}")
    one, two = weights(folder / f"whole-{method}"), weights(folder / f"killed-{method}")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert losses(folder / f"whole-{method}") == losses(folder / f"killed-{method}")


def test_two_ranks_and_pieces_give_the_losses_of_one(folder, trainer):
    """EPR has a term over the whole batch: with pieces it takes two forwards."""
    kinds = {"plain": {}, "pieces": {"micro_batch": 3}}
    jobs = [config(folder, f"{method}-{kind}-2", method, **extra) for method in ("an", "epr")
            for kind, extra in kinds.items()]
    Launch.many([{"config": job} for job in jobs], "two", folder, 2).ok()
    for method in ("an", "epr"):
        trainer.train(config(folder, f"{method}-1", method))
        expected = losses(folder / f"{method}-1")
        for kind in kinds:
            np.testing.assert_allclose(losses(folder / f"{method}-{kind}-2"), expected, rtol=1e-5)


def test_what_could_not_work_is_refused(folder, trainer):
    def build(change):
        made = config(folder, "refused")
        change(made["data"])
        return lambda: build_run(parse_config(made, "test"), trainer.world, trainer.watchdog)

    for change, message in (
            (lambda data: data.pop("fully_labelled"), "fully_labelled_weight = 0.5 needs images"),
            (lambda data: data["fully_labelled"].update(labels="single"), "labels in the sidecar 'single' are unknown"),
            (lambda data: data.update(val=data["fully_labelled"]), "shares 11 images with data.val"),
            (lambda data: data.update(test={"url": data["train"]["url"]}), "shares 11 images with data.test")):
        with pytest.raises(UserError, match=message):
            build(change)()
    shutil.rmtree(folder / "refused", ignore_errors=True)
    with pytest.raises(UserError, match=r"train\.fully_labelled_weight"):
        parse_config(config(folder, "negative", weight=-1.0), "test")
