"""Mixup and cutmix: shares and boxes as drawn, the loss of a plain loop, 1 = 2 ranks, resume, and who refuses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.trainer.assemble import build_run
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.mixing import Draws, Mixer, check_mixing, pairs
from tests.helpers.launching import Launch, losses, weights
from tests.helpers.small_runs import Trainer, body, make_data

PLAN = EpochPlan(np.full(4, 5), seed=3, epoch=1, streams=2, batch=8)


def config(folder: Path, name: str, method: str = "an", **train) -> dict:
    made = body(folder, name)
    made["method"] = {"name": method}
    made["phases"][0] |= {"optimizer": "sgd", "lr": 0.5}
    made["train"] |= {"mixup": 0.6, **train}
    return made


def whole_batch(plan: EpochPlan, step: int, streams: range, side: int = 0) -> Batch:
    """Inputs that tell which sample they come from."""
    shards, rows = list(plan.batches(streams))[step]
    numbers = torch.from_numpy(10 * shards + rows)
    inputs = (numbers.to(torch.uint8)[:, None, None, None].expand(-1, 3, side, side).clone() if side
              else numbers.float()[:, None].expand(-1, 6).clone())
    labels = torch.from_numpy(np.eye(20, dtype=np.int8)[(5 * shards + rows) % 20])
    boxes, flips = torch.zeros(len(rows), 4), torch.zeros(len(rows), dtype=torch.bool)
    return Batch(inputs, labels, shards, rows, boxes, flips, shards)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    make_data(folder)
    return folder


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


def test_shares_follow_the_beta_distribution():
    for strength, spread in ((1.0, 1 / 12), (0.2, 1 / (4 * 1.4))):  # its variance is 1 / (4 (2a + 1))
        drawn = np.array([Draws(seed).beta(strength) for seed in range(4000)])
        assert drawn.mean() == pytest.approx(0.5, abs=0.03)
        assert drawn.var() == pytest.approx(spread, rel=0.06)


def test_partners_are_the_next_of_the_stream_on_any_number_of_ranks():
    whole = whole_batch(PLAN, 0, range(2))
    found = pairs(PLAN, whole.shards)
    assert sorted(found) == list(range(8))
    streams = [{*order} for order in PLAN.stream_shards]
    assert all((whole.shards[i] in streams[0]) == (whole.shards[j] in streams[0]) for i, j in enumerate(found))
    assert all(i != j for i, j in enumerate(found))
    parts = [pairs(PLAN, whole_batch(PLAN, 0, range(r, r + 1)).shards) + 4 * r for r in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), found)
    np.testing.assert_array_equal(pairs(PLAN, whole.shards[:1]), [0])


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_inputs_and_labels_are_mixed_by_the_shares(kind, folder):
    settings = parse_config(config(folder, "x", **{"mixup": 0.0, kind: 1.0}), "test")
    plain, mixed = (whole_batch(PLAN, 0, range(2), side=16) for _ in range(2))
    mixed = Mixer(settings, 0).apply(mixed, PLAN)
    partners = pairs(PLAN, plain.shards)
    assert torch.equal(mixed.labels, plain.labels)
    assert torch.equal(mixed.other_labels, plain.labels[partners])
    assert mixed.shares.std() > 0.1
    for i, j in enumerate(partners):
        own, other, share = float(plain.inputs[i, 0, 0, 0]), float(plain.inputs[j, 0, 0, 0]), float(mixed.shares[i])
        image = mixed.inputs[i].float()
        if kind == "mixup":
            assert torch.equal(image, torch.full_like(image, share * own + (1 - share) * other).round())
        else:
            assert {own, other} >= set(image.unique().tolist())
            assert (image == other).float().mean().item() == pytest.approx(1 - share, abs=1e-6)
    halves = [Mixer(settings, 0).apply(whole_batch(PLAN, 0, range(r, r + 1), side=16), PLAN) for r in range(2)]
    assert torch.equal(torch.cat([half.inputs for half in halves]), mixed.inputs)
    assert torch.equal(torch.cat([half.shares for half in halves]), mixed.shares)


def test_without_settings_a_batch_stays_what_it_is(folder):
    batch = whole_batch(PLAN, 0, range(2))
    assert Mixer(parse_config(config(folder, "x", mixup=0.0), "test"), 0).apply(batch, PLAN) is batch


def test_two_ranks_and_pieces_give_the_losses_of_one_and_a_resume_changes_nothing(folder, trainer):
    trainer.train(config(folder, "one"))
    trainer.train(config(folder, "plain", mixup=0.0))
    assert not np.allclose(losses(folder / "plain"), losses(folder / "one"), rtol=1e-3)
    Launch.many([{"config": config(folder, "two", micro_batch=3)}], "ranks", folder, 2).ok()
    np.testing.assert_allclose(losses(folder / "two"), losses(folder / "one"), rtol=1e-5)
    for leave in (6, 11, None):
        trainer.train(config(folder, "killed"), leave)
    assert losses(folder / "killed") == losses(folder / "one")
    one, killed = weights(folder / "one"), weights(folder / "killed")
    assert all(torch.equal(one[name], killed[name]) for name in one)


def test_what_is_kept_of_single_images_and_groups_is_not_mixed(folder, trainer):
    settings = config(folder, "refused")
    method = build_run(parse_config({**settings, "name": "built"}, "test"), trainer.world, trainer.watchdog).method
    with pytest.raises(UserError, match=r"train\.mixup = 0\.6: train\.group_weight = 0\.1 remembers"):
        check_mixing(parse_config({**settings, "train": {"mixup": 0.6, "group_weight": 0.1}}, "test"), method, True)
    settings["phases"][0]["cache"] = {}
    with pytest.raises(UserError, match=r"phases\.0\.cache keeps what was computed"):
        check_mixing(parse_config(settings, "test"), method, True)


@pytest.mark.parametrize(("method", "train", "message"), [
    ("en", {}, "train.mixup = 0.6: method 'en' remembers single samples"),
    ("epr", {}, "train.mixup = 0.6: method 'epr' compares images"),
    ("an", {"mixup": 0.0, "cutmix": 0.5}, "train.cutmix = 0.5: feature vectors have no places"),
])
def test_who_cannot_mix_says_so(folder, trainer, method, train, message):
    with pytest.raises(UserError, match=message):
        build_run(parse_config(config(folder, "refused", method, **train), "test"), trainer.world, trainer.watchdog)
