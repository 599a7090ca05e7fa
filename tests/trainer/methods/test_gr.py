"""GR equals its formula and finite differences over its whole schedule; GPR's pseudo-label term equals its formula."""

import math

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.trainer.methods.gr import GrSettings, Schedule, pseudo_positive_entries
from tests.helpers.gr_schedule import schedule_by_formula
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, sigmoid

COCO = {"slope": (0, 10), "offset": (-2, -8)}
CUB = {**COCO, "q_negative": 1.5, "q_positive": 0.3}


def oracle_for(epoch, epochs=10, q_positive=0.01, q_negative=1.0, linear_epochs=0, **settings):
    w, b, mu, s = schedule_by_formula(epoch + 1, epochs, linear_epochs, **settings)

    def oracle(a, z, fixed):
        loss = 0.0
        for n, i in np.ndindex(*a.shape):
            p, held = sigmoid(a[n, i]), sigmoid(fixed[n, i])
            if z[n, i] == POSITIVE:
                loss -= math.log(p + 1e-7)
            elif z[n, i] == NEGATIVE:
                loss -= math.log(1 - p + 1e-7)
            else:
                k, v = sigmoid(w * held + b), math.exp(-0.5 * ((held - mu) / s) ** 2)
                loss += v * (k * (1 - p**q_positive) / q_positive
                             + (1 - k) * (1 - (1 - p) ** q_negative) / q_negative)
        return loss / a.size
    return oracle


@pytest.mark.parametrize("epoch", [0, 1, 4, 9])
@pytest.mark.parametrize("settings", [{}, COCO, CUB, {"linear_epochs": 3}])
def test_value_and_gradient_equal_the_formula(epoch, settings):
    assert_formula("gr", oracle_for(epoch, **settings), random_case(5), epoch, **settings)
    assert_float32_close("gr", oracle_for(epoch, **settings), epoch=epoch, **settings)


def test_schedule_of_one_epoch_and_of_only_linear_epochs():
    settings = GrSettings(name="gr", linear_epochs=1)
    assert Schedule.at(GrSettings(name="gr"), 0, 1) == Schedule(0.0, -2.0, 0.8, 0.5)
    assert Schedule.at(settings, 0, 1) == Schedule(0.0, -2.0, 0.5, 2.0)


def test_pseudo_positive_term():
    a, _ = random_case(6)
    schedule = Schedule(2.0, -2.0, 0.6, 0.7)
    logits = torch.tensor(a, requires_grad=True)
    entries = pseudo_positive_entries(logits, schedule, most=0.7, least=0.4)
    entries.sum().backward()
    for n, i in np.ndindex(*a.shape):
        p = sigmoid(a[n, i])
        v = math.exp(-0.5 * ((p - 0.6) / 0.7) ** 2)
        u = 1 - min(max(v, 1 - 0.7), 1 - 0.4)
        assert 0.4 - 1e-12 <= u <= 0.7 + 1e-12
        assert entries[n, i].item() == pytest.approx(
            u * (-0.9 * math.log(p + 1e-7) - 0.1 * math.log(1 - p + 1e-7)), rel=1e-9)
        slope = u * p * (1 - p) * (-0.9 / (p + 1e-7) + 0.1 / (1 - p + 1e-7))
        assert logits.grad[n, i].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_odd_inputs_stay_finite():
    assert_finite("gr")
    assert_finite("gr", **CUB)
