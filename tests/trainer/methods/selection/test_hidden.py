"""The integral over hidden positives and its gradient are exact to 1e-4, for few and many, likely and rare classes."""

import numpy as np
import pytest
import torch
from scipy.stats import gamma

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods.selection.hidden import interval
from lacuna.trainer.methods.selection.likelihood import fixed
from tests.helpers.label_sets import log_likelihood


def logits_of(total, classes, spread, rng):
    """Random logits, shifted so that Σp = total."""
    draw = rng.normal(0, spread, classes)
    low, high = -60.0, 60.0
    for _ in range(60):
        shift = (low + high) / 2
        low, high = (shift, high) if (1 / (1 + np.exp(-draw - shift))).sum() < total else (low, shift)
    return torch.tensor(draw + shift, dtype=torch.float32)


def assert_close_to_many_nodes(logits, shown):
    labels = torch.full(logits.shape, UNKNOWN, dtype=torch.int8)
    labels[:shown] = POSITIVE
    labels[shown : shown + 2] = NEGATIVE
    leaf = logits.double().requires_grad_()
    expected = -log_likelihood(leaf, labels)
    expected.backward()
    found = fixed(logits[None], labels[None])
    assert found.surprise.item() == pytest.approx(expected.item(), abs=1e-4 + 2e-7 * expected.item())
    np.testing.assert_allclose(found.residual[0].numpy(), leaf.grad.numpy(), rtol=2e-4, atol=5e-7)


@pytest.mark.parametrize("shown", [1, 2, 5, 12])
@pytest.mark.parametrize("classes", [80, 300, 1000, 9600])
def test_any_sum_of_probabilities(classes, shown):
    rng = np.random.default_rng(classes + shown)
    for total in np.geomspace(0.1, classes / 2, 7):
        for spread in (0.0, 2.0, 5.0):
            assert_close_to_many_nodes(logits_of(total, classes, spread, rng), shown)


@pytest.mark.parametrize("classes", [80, 1000, 9600])
def test_an_untrained_head(classes):
    generator = torch.Generator().manual_seed(0)
    assert_close_to_many_nodes(torch.randn(classes, generator=generator) * 0.05, 1)  # p ≈ 0.5 everywhere


@pytest.mark.parametrize("shown", [1, 3])
def test_certain_and_impossible_classes(shown):
    logits = torch.full((600,), -90.0)
    assert_close_to_many_nodes(logits, shown)
    logits[20:50] = 90.0
    assert_close_to_many_nodes(logits, shown)


def test_as_many_shown_as_there_may_be():
    rng = np.random.default_rng(3)
    for shown in (20, 30, 60):
        assert_close_to_many_nodes(logits_of(40, 80, 2.0, rng), shown)


@pytest.mark.parametrize("m", [1.0, 2.0, 40.0, 1000.0])
def test_the_interval_ends_where_a_gamma_density_has_fallen(m):
    low, high = interval(torch.tensor(1e-3, dtype=torch.float64), torch.tensor(m, dtype=torch.float64))
    scale = 1e-3 / m  # the density of m·s/peak is Gamma(m)
    assert gamma.cdf(low.item() / scale, m) + gamma.sf(high.item() / scale, m) < 1e-5
