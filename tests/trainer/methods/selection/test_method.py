"""`selection` trains by the likelihood that its settings name, estimates and keeps q, and refuses vain settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.trainer.methods import build_method, score_of
from lacuna.trainer.methods.base import Outputs, Task
from lacuna.trainer.scores import SCORES, SIGMOID
from tests.helpers.label_sets import by_enumeration
from tests.helpers.loss_checks import assert_finite, random_case, total
from tests.helpers.oracles import LOGITS, OBSERVED, batch_of, step_of, task_of


def mean_by_enumeration(a, z, q=None):
    return np.mean([by_enumeration(logits, labels, q)[0] for logits, labels in zip(a, z, strict=True)]) / a.shape[1]


def test_golden_value():
    assert float(total("selection", torch.tensor(LOGITS), OBSERVED)) == pytest.approx(0.170362, abs=1e-6)


@pytest.mark.parametrize("q", [None, 0.3, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]])
def test_the_loss_is_the_mean_over_all_label_sets(q):
    a, z = random_case(7)
    settings = {} if q is None else {"shown": "independent", "q": q}
    each = None if q is None else np.broadcast_to(q, a.shape[1])
    value = total("selection", torch.tensor(a, dtype=torch.float32), z, **settings)
    assert float(value) == pytest.approx(mean_by_enumeration(a, z, each), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"shown": "independent", "q": 0.3}])
def test_odd_inputs_stay_finite(settings):
    assert_finite("selection", **settings)


def task(z, k=None):
    return Task(z.shape[1], len(z), (z == POSITIVE).sum(0), np.zeros(z.shape[1], np.int64), False, expected_positives=k)


@pytest.mark.parametrize(("settings", "k"), [({}, 4.0), ({"q": "estimated"}, 4.0)])
def test_q_is_estimated_from_the_expected_positives(settings, k):
    _, z = random_case(7)
    method = build_method({"name": "selection", "shown": "independent", **settings}, task(z, k))
    assert method.state()["q"].item() == pytest.approx((z == POSITIVE).sum(1).mean() / 4.0)
    resumed = build_method({"name": "selection", "shown": "independent", **settings}, task(z, 2 * k))
    resumed.load_state(method.state())
    assert torch.equal(resumed.state()["q"], method.state()["q"])


@pytest.mark.parametrize(("settings", "k", "words"), [
    ({"q": 0.5}, None, "no effect with shown: fixed"),
    ({"shown": "independent", "q": 1.0}, None, r"q.*less than 1"),
    ({"shown": "independent", "q": 0}, None, r"q.*greater than 0"),
    ({"shown": "independent", "q": [0.5, 0.5]}, None, "2 numbers, but there are 9 classes"),
    ({"shown": "independent"}, None, "expected_positives"),
    ({"shown": "independent"}, 0.1, r"cannot be estimated: data.train shows .* positives per image, of 0.1"),
    ({"shown": "some"}, None, "fixed"),
])
def test_settings_without_sense_are_named(settings, k, words):
    with pytest.raises(UserError, match=words):
        build_method({"name": "selection", **settings}, task(random_case(7)[1], k))


def test_images_are_ranked_beside_their_other_classes():
    """Where one positive was shown; independent positives are read as they are."""
    assert score_of({"name": "selection", "shown": "independent"}) is SIGMOID
    assert score_of({"name": "selection", "ranking": "alone"}) is SIGMOID
    score = score_of({"name": "selection"})
    logits = np.random.RandomState(0).randn(5, 7, 2, 2)
    bias = np.linspace(-2, 0, 7)
    evidence = np.exp(logits - bias[:, None, None])
    expected = 1 / (1 + np.exp(-(logits - 0.5 * np.log(evidence.sum(1, keepdims=True)))))
    np.testing.assert_allclose(score(torch.from_numpy(logits), torch.from_numpy(bias)).numpy(), expected, rtol=1e-6)
    flat = score(torch.from_numpy(logits[..., 0, 0]), torch.from_numpy(bias)).numpy()
    np.testing.assert_allclose(flat, expected[..., 0, 0], rtol=1e-6)
    assert SCORES[score.name] is score
    assert not score.per_class


@pytest.mark.parametrize("phase", [0, 1])
def test_before_its_phase_the_loss_is_that_of_wan(phase):
    a, z = random_case(7)
    logits, batch, step = torch.tensor(a), batch_of(z), replace(step_of(len(z), 0, 10), phase=phase)
    warm = build_method({"name": "selection", "start_phase": 1}, task_of(z)).loss(Outputs(logits), batch, step)
    other = build_method({"name": "selection" if phase else "wan"}, task_of(z)).loss(Outputs(logits), batch, step)
    torch.testing.assert_close(warm.per_sample, other.per_sample)
