"""Hill and SPLC equal their formulas, Hill's golden value and finite differences; SPLC corrects from its epoch on."""

import math

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, sigmoid, total
from tests.helpers.oracles import LOGITS, OBSERVED


def hill_oracle(a, z, fixed, margin=1.0, gamma=2.0, hill=1.5):
    loss = 0.0
    for n, i in np.ndindex(*a.shape):
        p, shifted = sigmoid(a[n, i]), sigmoid(a[n, i] - margin)
        loss += -((1 - shifted) ** gamma) * math.log(shifted) if z[n, i] == POSITIVE else (hill - p) * p * p
    return loss


def splc_oracle(epoch, threshold=0.6, first_epoch=1, margin=1.0, gamma=2.0):
    def oracle(a, z, fixed):
        loss = 0.0
        for n, i in np.ndindex(*a.shape):
            positive = z[n, i] == POSITIVE
            p = sigmoid(a[n, i] - margin if positive else a[n, i])
            if epoch >= first_epoch and z[n, i] == UNKNOWN and sigmoid(fixed[n, i]) > threshold:
                positive = True
            loss += -((1 - p) ** gamma) * math.log(p) if positive else -(p**gamma) * math.log(1 - p)
        return loss
    return oracle


def test_golden_value():
    assert float(total("hill", torch.tensor(LOGITS), OBSERVED)) == pytest.approx(0.952161, abs=2e-6)


@pytest.mark.parametrize("settings", [{}, {"margin": 0.5, "gamma": 3, "hill": 1.2}])
def test_hill_equals_the_formula(settings):
    assert_formula("hill", lambda a, z, fixed: hill_oracle(a, z, fixed, **settings), random_case(2), **settings)
    assert_float32_close("hill", hill_oracle)


def test_hills_gradient_on_negatives():
    """3p²(1 − p)² at λ = 1.5: confident predictions are forgiven."""
    logits = torch.linspace(-6, 6, 13, dtype=torch.float64)[None].requires_grad_()
    total("hill", logits, np.full((1, 13), UNKNOWN, np.int8)).backward()
    p = logits.detach().sigmoid()
    torch.testing.assert_close(logits.grad, 3 * p**2 * (1 - p) ** 2)


@pytest.mark.parametrize("epoch", [0, 1, 5])
@pytest.mark.parametrize("settings", [{}, {"threshold": 0.8, "first_epoch": 3, "margin": 0.5, "gamma": 1}])
def test_splc_equals_the_formula(epoch, settings):
    assert_formula("splc", splc_oracle(epoch, **settings), random_case(3), epoch, **settings)
    assert_float32_close("splc", splc_oracle(epoch), epoch=epoch)


def test_splc_corrects_confident_unknowns_without_margin_and_never_verified_negatives():
    logits = torch.tensor([[3.0, 3.0, 0.2]])
    labels = np.array([[UNKNOWN, NEGATIVE, UNKNOWN]], np.int8)
    as_positive, as_negative = (float(-torch.sigmoid(-s * logits[0, 0]) ** 2 * torch.nn.functional.logsigmoid(
        s * logits[0, 0])) for s in (1, -1))
    rest = float(torch.sigmoid(logits[0, 2]) ** 2 * -torch.nn.functional.logsigmoid(-logits[0, 2]))
    assert float(total("splc", logits, labels, epoch=0)) == pytest.approx(2 * as_negative + rest, rel=1e-5)
    assert float(total("splc", logits, labels, epoch=1)) == pytest.approx(as_positive + as_negative + rest, rel=1e-5)


@pytest.mark.parametrize("name", ["hill", "splc"])
def test_odd_inputs_stay_finite(name):
    assert_finite(name)
