"""A run that was killed or stopped and resumed ends as if it had never been, on the same or another number of ranks.

Its phases train the head, then the head with one layer of the backbone, then everything.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lacuna.tools.launches import timeless
from tests.helpers.launching import (
    Launch,
    assert_equal_weights,
    last_checkpoint,
    losses,
    metrics,
    optimizer_tensors,
    trace,
    weights,
)
from tests.helpers.run_configs import config

LAST = "6"  # the last layer of lacuna:tiny
EPOCH, EPOCHS = 16, 4  # steps of an epoch, epochs of the three phases


def three_phases(shards: Path, name: str, **phase) -> dict:
    body = config(shards, name, **phase)
    head, everything = body["phases"]
    body["phases"] = [head, {**head, "name": "last", "trainable": ["head", LAST]}, everything]
    return body


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def reference(digit_shards, folder) -> Path:
    """Two ranks, never interrupted."""
    launch = Launch(three_phases(digit_shards, "reference"), folder, 2)
    launch.ok()
    return launch.folder


@pytest.fixture(scope="module")
def sgd_reference(digit_shards, folder) -> Path:
    launch = Launch(three_phases(digit_shards, "sgd-reference", optimizer="sgd", lr=0.05), folder, 2, "train.keep=99")
    launch.ok()
    return launch.folder


def test_two_ranks_and_one_rank_see_the_same_batches_and_the_same_losses(digit_shards, folder, reference):
    launch = Launch(three_phases(digit_shards, "one-rank"), folder, 1, cwd=Path("/"))  # works from any folder
    launch.ok()
    assert trace(launch.folder) == trace(reference)
    np.testing.assert_allclose(losses(launch.folder), losses(reference), rtol=1e-3)
    assert len(trace(reference)) == EPOCHS * EPOCH
    for epoch in range(EPOCHS):
        batches = [trace(reference)[s] for s in range(epoch * EPOCH + 1, (epoch + 1) * EPOCH + 1)]
        assert sum(map(len, batches)) == len(set().union(*batches)) == 410, "a sample was dropped or repeated"


def test_only_what_a_phase_names_learns(sgd_reference):
    """The rest keeps every bit and is not known to the optimizer; two ranks."""
    start, after_head, after_last, end = (
        load_file(sgd_reference / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        for step in (5, EPOCH, 2 * EPOCH, EPOCHS * EPOCH))
    head = {"head.weight", "head.bias"}
    last = {f"backbone.{LAST}.weight", f"backbone.{LAST}.bias"}
    assert changed(start, after_head) == head
    assert changed(after_head, after_last) == head | last
    assert changed(after_last, end) == {name for name in end if not name.startswith("head_norm.")}
    known = optimizer_tensors(sgd_reference, 2 * EPOCH)
    assert sorted(tuple(t.shape) for t in known if t.ndim) == sorted(tuple(end[name].shape) for name in head | last)


def changed(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], two[name])}


def test_sgd_losses_of_one_and_two_ranks_agree_to_rounding(digit_shards, folder):
    runs = []
    for ranks in (1, 2):
        body = config(digit_shards, f"sgd-{ranks}", optimizer="sgd", lr=0.05)
        body["phases"] = [{**body["phases"][1], "epochs": 4}]
        launch = Launch(body, folder, ranks, "data.val=null", "data.test=null")
        launch.ok()
        runs.append(losses(launch.folder))
    assert len(runs[0]) >= 50
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-5)


def test_killed_at_random_steps_and_resumed_is_bit_equal(digit_shards, folder, reference):
    body = three_phases(digit_shards, "killed")
    rng = random.Random(1)
    total = max(trace(reference))
    for step in sorted(rng.sample(range(2, total - 2), 3)):
        launch = Launch(body, folder, 2)
        launch.wait_for_step(step)
        for pid in launch.ranks():
            signal.pidfd_send_signal(_pidfd(pid), signal.SIGKILL)
        assert launch.wait() != 0
    launch = Launch(body, folder, 2)
    launch.ok()
    assert "resuming from" in launch.text()
    assert_equal_weights(reference, launch.folder)
    for a, b in zip(optimizer_tensors(reference), optimizer_tensors(launch.folder), strict=True):
        assert torch.equal(a, b)
    assert timeless(metrics(launch.folder)) == timeless(metrics(reference))
    assert trace(launch.folder) == trace(reference)
    assert (launch.folder / "results.json").read_text() == (reference / "results.json").read_text()


# DeepSpeed converts Adam's state only. Adam blows up rounding differences of weights whose gradient is almost zero, so
# its weights are compared loosely; SGD shows that the resume itself is exact to rounding.
@pytest.mark.parametrize(("stage", "before", "after", "optimizer", "tolerance"), [
    ("zero0", 2, 1, "sgd", 1e-5), ("zero1", 2, 1, "adam", 1e-2), ("zero2", 1, 2, "adam", 1e-2)])
def test_another_number_of_ranks_continues_the_same_epoch(digit_shards, folder, reference, sgd_reference, stage, before,
                                                          after, optimizer, tolerance):
    sgd = optimizer == "sgd"
    expected = sgd_reference if sgd else reference
    body = three_phases(digit_shards, f"elastic-{stage}", **({"optimizer": "sgd", "lr": 0.05} if sgd else {}))
    launch = Launch(body, folder, before, f"train.deepspeed={stage}")
    launch.wait_for_step(EPOCH + 7)  # in the phase with a part of the backbone, after a checkpoint of its own
    launch.signal_all(signal.SIGKILL)
    launch.wait()
    launch = Launch(body, folder, after, f"train.deepspeed={stage}")
    launch.ok()
    assert "resuming from" in launch.text()
    assert trace(launch.folder) == trace(expected)
    np.testing.assert_allclose(losses(launch.folder), losses(expected), rtol=1e-5 if sgd else 2e-3)
    for name, value in weights(launch.folder).items():
        torch.testing.assert_close(value, weights(expected)[name], rtol=tolerance, atol=tolerance)


def test_sigterm_finishes_the_step_writes_a_checkpoint_and_exits_0(digit_shards, folder, reference):
    body = three_phases(digit_shards, "terminated")
    launch = Launch(body, folder, 1, "train.checkpoint_every=1000st", "data.streams=4")
    launch.wait_for_step(17)
    launch.signal_all(signal.SIGTERM)
    assert launch.wait() == 0, launch.text()
    reached = int(last_checkpoint(launch.folder).name.removeprefix("step-"))
    assert reached >= 17
    assert "stopped as asked" in launch.text()
    launch = Launch(body, folder, 1)
    launch.ok()
    assert f"step-{reached:08d}" in launch.text()
    assert trace(launch.folder) == trace(reference)


def test_a_torn_checkpoint_is_passed_over_and_old_ones_are_collected(digit_shards, folder, reference):
    kept = sorted(p.name for p in (reference / "checkpoints").glob("step-*"))
    assert 2 <= len(kept) <= 3, "the last two and the best"
    body = three_phases(digit_shards, "torn")
    launch = Launch(body, folder, 1)
    launch.wait_for_step(24)
    launch.signal_all(signal.SIGKILL)
    launch.wait()
    newest = last_checkpoint(launch.folder)
    victim = newest / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-7])
    launch = Launch(body, folder, 1)
    launch.ok()
    assert f"{newest} is torn (model.safetensors is damaged)" in launch.text()
    assert "resuming from" in launch.text()
    assert trace(launch.folder) == trace(reference)


def _pidfd(pid: int) -> int:
    import os

    return os.pidfd_open(pid)
