"""ASL equals its formula, the golden values and finite differences, with and without gradients of the focal weight."""

import math

import pytest
import torch

from lacuna.data_pipelines.labels import POSITIVE
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, sigmoid, total
from tests.helpers.oracles import LOGITS, OBSERVED


def oracle_for(gamma_positive, gamma_negative, clip, focal_gradient):
    def oracle(a, z, fixed):
        p, weighing = sigmoid(a), sigmoid(a if focal_gradient else fixed)
        loss = 0.0
        for n, i in [(n, i) for n in range(len(a)) for i in range(a.shape[1])]:
            if z[n, i] == POSITIVE:
                loss -= math.log(max(p[n, i], 1e-8)) * (1 - weighing[n, i]) ** gamma_positive
            else:
                q, q_weighing = min(1 - p[n, i] + clip, 1), min(1 - weighing[n, i] + clip, 1)
                loss -= math.log(max(q, 1e-8)) * (1 - q_weighing) ** gamma_negative
        return loss
    return oracle


@pytest.mark.parametrize(("gamma_positive", "golden"), [(0, 0.449246), (1, 0.172778)])
def test_golden_values(gamma_positive, golden):
    value = total("asl", torch.tensor(LOGITS), OBSERVED, gamma_positive=gamma_positive)
    assert float(value) == pytest.approx(golden, abs=2e-6)


@pytest.mark.parametrize("focal_gradient", [False, True])
@pytest.mark.parametrize(("gamma_positive", "gamma_negative", "clip"), [(0, 4, 0.05), (1, 2.5, 0), (0, 0, 0)])
def test_value_and_gradient_equal_the_formula(gamma_positive, gamma_negative, clip, focal_gradient):
    settings = {"gamma_positive": gamma_positive, "gamma_negative": gamma_negative, "clip": clip,
                "focal_gradient": focal_gradient}
    assert_formula("asl", oracle_for(**settings), random_case(1), **settings)
    assert_float32_close("asl", oracle_for(**settings), **settings)


@pytest.mark.parametrize("settings", [{}, {"focal_gradient": True, "gamma_positive": 0.5, "gamma_negative": 0.5}])
def test_odd_inputs_stay_finite(settings):
    assert_finite("asl", **settings)


def test_far_below_the_floor_there_is_no_gradient():
    logits = torch.tensor([[-40.0, 3.0]], requires_grad=True)
    value = total("asl", logits, [[POSITIVE, POSITIVE]])
    value.backward()
    assert value.item() == pytest.approx(-math.log(1e-8) + math.log1p(math.exp(-3)), rel=1e-6)
    assert logits.grad[0, 0] == 0
