"""EM equals its formula, the golden value and finite differences."""

import math

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, sigmoid, total
from tests.helpers.oracles import LOGITS, OBSERVED


def oracle_for(weight):
    def oracle(a, z, fixed):
        loss = 0.0
        for n, i in np.ndindex(*a.shape):
            p = sigmoid(a[n, i])
            as_positive, as_negative = -math.log(p + 1e-5), -math.log(1 - p + 1e-5)
            if z[n, i] == POSITIVE:
                loss += as_positive
            elif z[n, i] == NEGATIVE:
                loss += as_negative
            else:
                loss -= weight * (p * as_positive + (1 - p) * as_negative)
        return loss / a.size
    return oracle


def test_golden_value():
    value = total("em", torch.tensor(LOGITS), OBSERVED, entropy_weight=0.2)
    assert float(value) == pytest.approx(-0.037888, abs=2e-6)


@pytest.mark.parametrize("weight", [0.1, 0.01, 1.0])
def test_value_and_gradient_equal_the_formula(weight):
    assert_formula("em", oracle_for(weight), random_case(4), entropy_weight=weight)
    assert_float32_close("em", oracle_for(weight), entropy_weight=weight)


def test_odd_inputs_stay_finite():
    assert_finite("em")
