"""Proves that a ZeRO checkpoint that DeepSpeed cannot share among so many ranks is refused with a sentence."""

from __future__ import annotations

import signal

import pytest

from lacuna.trainer.checkpoints.checkpoint import _everyone_has_some
from tests.helpers.launching import Launch
from tests.helpers.run_configs import config


def parts(numbers: int, ranks: int) -> list[int]:
    """How many numbers each rank holds: the flat group is padded until every rank's part is as long and even."""
    padded = numbers
    while padded % (2 * ranks):
        padded += 1
    each = padded // ranks
    return [max(0, min(numbers, (rank + 1) * each) - rank * each) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_last_rank_has_something_or_not(ranks):
    for numbers in range(1, 100):
        assert _everyone_has_some(numbers, ranks) == (parts(numbers, ranks)[-1] > 0), numbers


@pytest.mark.long
def test_too_many_ranks_are_refused_and_the_run_goes_on_with_its_own(digit_shards, tmp_path):
    """A head of ten classes whose bias is a group of its own: ten numbers, of which the last of 4 ranks has none."""
    body = config(digit_shards, "run")
    body["data"] |= {"val": None, "test": None}
    body["phases"] = [{**body["phases"][0], "epochs": 2, "weight_decay": 0.01}]
    body["train"] |= {"deepspeed": "zero1", "ema_decay": 0.0}
    launch = Launch(body, tmp_path, 2)
    launch.wait_for_step(7)
    launch.signal_all(signal.SIGKILL)
    launch.wait()
    refused = Launch(body, tmp_path, 4)
    assert refused.wait() == 2
    assert "has only 10 numbers. Resume with 2 ranks, or with at most 3." in refused.text()
    assert "Traceback" not in refused.text()
    again = Launch(body, tmp_path, 2)
    again.ok()
