"""Softmax equals its formula, has no loss for images that show nothing, and scores by probabilities over classes."""

import math

import numpy as np
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import METHODS, score_of
from lacuna.trainer.scores import SIGMOID, SOFTMAX
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, total


def oracle(a, z, fixed):
    loss = 0.0
    for logits, labels in zip(a, z, strict=True):
        shown = [i for i in range(len(labels)) if labels[i] == POSITIVE]
        log_sum = math.log(sum(math.exp(x) for x in logits))
        loss -= sum((logits[i] - log_sum) / len(shown) for i in shown)
    return loss / len(a)


def test_value_and_gradient_equal_the_formula():
    assert_formula("softmax", oracle, random_case(1))
    assert_float32_close("softmax", oracle)


def test_odd_inputs_stay_finite():
    assert_finite("softmax")


def test_an_image_that_shows_nothing_has_no_loss():
    logits = torch.tensor([[1.0, -2.0, 0.5]], requires_grad=True)
    total("softmax", logits, np.array([[UNKNOWN, NEGATIVE, UNKNOWN]], np.int8)).backward()
    assert (logits.grad == 0).all()


def test_scores_are_probabilities_over_the_classes():
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    score = score_of({"name": "softmax"})
    assert score is SOFTMAX
    assert not score.per_class
    expected = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    np.testing.assert_allclose(score(logits, torch.zeros(3)), expected, rtol=1e-6)
    maps = logits[:, :, None, None].expand(-1, -1, 2, 2)
    np.testing.assert_allclose(score(maps, torch.zeros(3))[:, :, 1, 0], expected, rtol=1e-6)  # each cell on its own


def test_the_other_methods_score_by_the_sigmoid():
    assert {name for name in METHODS if score_of({"name": name}) is not SIGMOID} == {"softmax", "selection"}
    assert torch.equal(SIGMOID(torch.tensor([[0.3]]), torch.ones(1)), torch.sigmoid(torch.tensor([[0.3]])))
