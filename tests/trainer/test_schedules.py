"""The lr of every step is that of torch's schedulers, over several epochs, and durations mean what they say."""

from __future__ import annotations

import pytest
import torch

from lacuna.basics.clock import clock
from lacuna.basics.errors import UserError
from lacuna.trainer.config.durations import check_duration, check_positive_duration, to_steps
from lacuna.trainer.schedules import lr_factor

EPOCHS, STEPS = 5, 8


def torch_factors(make) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(EPOCHS * STEPS):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def our_factors(schedule: str, warmup: str) -> list[float]:
    total = EPOCHS * STEPS
    return [lr_factor(schedule, step, total, to_steps(warmup, STEPS, total)) for step in range(total)]


@pytest.mark.parametrize("part", [10, 20, 50])
def test_one_cycle_is_torchs(part):
    expected = torch_factors(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, epochs=EPOCHS, steps_per_epoch=STEPS, pct_start=part / 100))
    assert our_factors("one_cycle", f"{part}%") == pytest.approx(expected, abs=1e-9)


def test_cosine_without_a_warm_up_is_torchs():
    expected = torch_factors(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS))
    assert our_factors("cosine", "0st") == pytest.approx(expected, abs=1e-9)


def test_a_warm_up_rises_in_equal_steps_to_the_full_lr():
    for schedule in ("constant", "cosine"):
        factors = our_factors(schedule, "1ep")
        assert factors[:STEPS] == pytest.approx([(step + 1) / STEPS for step in range(STEPS)])
        assert factors[STEPS] == 1.0
    assert set(our_factors("constant", "0st")) == {1.0}


def test_durations_in_steps_epochs_and_parts_of_the_phase():
    assert [to_steps(text, 8, 40) for text in ("12st", "2ep", "0.5ep", "25%", "1%", "0st", "0%")] == [
        12, 16, 4, 10, 1, 0, 0]
    for wrong in ("5", "5min", "-1st", "", 5, None, "nan%"):
        with pytest.raises(UserError, match="500st"):
            check_duration(wrong)
    with pytest.raises(UserError, match="longer than 0"):
        check_positive_duration("0ep")


def test_a_clock_shows_hours_minutes_and_seconds():
    assert [clock(seconds) for seconds in (5, 65.4, 3725)] == ["0:00:05", "0:01:05", "1:02:05"]
