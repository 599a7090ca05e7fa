"""NE, wNE, FE and LS equal their formulas, wNE's golden weights and finite differences."""

import math

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.soft_exposure.baselines import exposed_entries
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, sigmoid
from tests.helpers.oracles import batch_of, task_of

SETTINGS = {"ne": {}, "wne": {}, "fe": {}, "ls": {"temperature": 4.0}}


def oracle_for(name, positive_weight=None, temperature=None, alpha=-4.45, beta=5.45, gamma=1.0):
    weight = positive_weight or (5.0 if name == "fe" else 1.0)

    def oracle(a, z, fixed):
        loss = 0.0
        for n in range(len(a)):
            image = 0.0
            for i in range(a.shape[1]):
                if z[n, i] == POSITIVE:
                    image -= weight * math.log(sigmoid(a[n, i]))
                elif z[n, i] == NEGATIVE or name == "fe":
                    image -= math.log(sigmoid(-a[n, i]))
                elif name == "ls":
                    image -= math.log(sigmoid(a[n, i] / -temperature))
            if name == "wne":
                known = sum(z[n, i] != UNKNOWN for i in range(a.shape[1])) / a.shape[1]
                image *= (alpha * known**gamma + beta) / a.shape[1] if known else 0
            loss += image
        return loss / len(a)
    return oracle


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("more", [{}, {"positive_weight": 2.5}])
def test_value_and_gradient_equal_the_formula(name, more):
    settings = SETTINGS[name] | more
    assert_formula(name, oracle_for(name, **settings), random_case(7), **settings)
    assert_float32_close(name, oracle_for(name, **settings), **settings)


def test_wne_divides_by_the_number_of_annotations_when_asked():
    settings = {"alpha": 1.0, "beta": 0.0, "gamma": -1.0}
    assert_formula("wne", oracle_for("wne", **settings), random_case(8), **settings)
    assert_finite("wne", **settings)


def test_golden_weights():
    """g(ρ) at ρ = .1, .5 and 1."""
    labels = np.full((3, 10), UNKNOWN, np.int8)
    for row, known in enumerate((1, 5, 10)):
        labels[row, :known] = NEGATIVE
    method = build_method({"name": "wne"}, task_of(labels))
    weights = 10 * method.image_weights(batch_of(labels), torch.zeros(3, 10))
    np.testing.assert_allclose(weights, [5.005, 3.225, 1.0], rtol=1e-6)


def test_temperatures_by_entry():
    """Sharpness 1/T > 0: a soft positive; < 0: a soft negative; 0: ignored; the gradient takes its place."""
    logits = torch.tensor([[2.0, 2.0, 2.0, -3.0]], dtype=torch.float64)
    labels = torch.tensor([[UNKNOWN, UNKNOWN, UNKNOWN, POSITIVE]], dtype=torch.int8)
    sharpness = torch.tensor([[1 / 4.0, 1 / -4.0, 0.0, 7.0]], dtype=torch.float64)
    entries, _ = exposed_entries(logits, labels, sharpness)
    expected = [math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.5)), 0.0, math.log1p(math.exp(3))]
    np.testing.assert_allclose(entries.numpy()[0], expected, rtol=1e-12)
    expected = [-0.25 * sigmoid(-0.5), 0.25 * sigmoid(0.5), 0.0, -sigmoid(3)]
    np.testing.assert_allclose(sharpness.numpy()[0], expected, rtol=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_odd_inputs_stay_finite(name):
    assert_finite(name, **SETTINGS[name])


def test_ls_asks_for_its_temperature():
    with pytest.raises(UserError, match="temperature"):
        build_method({"name": "ls"}, task_of(np.zeros((1, 2), np.int8)))
