"""The stateless losses of Cole et al. equal their formulas, the published golden values, and autograd's gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import METHODS, build_method
from lacuna.trainer.methods.base import Outputs
from tests.helpers.oracles import LOGITS, OBSERVED, batch_of, step_of, task_of

K = 1.5
GOLDEN = {"an": 0.369787, "an_ls": 0.488532, "wan": 0.150622, "epr": 0.047319, "pr": 0.355057}


def total(name, logits, labels, **settings):
    method = build_method({"name": name, **settings}, replace(task_of(labels), expected_positives=K))
    terms = method.loss(Outputs(logits), batch_of(labels), step_of(len(labels)))
    return terms.per_sample.sum() / max(1, len(labels)) + (0 if terms.coupled is None else terms.coupled)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    value = total(name, torch.tensor(LOGITS), OBSERVED)
    assert float(value) == pytest.approx(GOLDEN[name], abs=2e-6)


def oracle(name, a, z):
    """By formula, entry by entry, in float64."""
    rows, classes = a.shape
    p = 1 / (1 + np.exp(-a.astype(np.float64)))
    nl = lambda x: -np.log(x + 1e-5)  # noqa: E731
    m = np.zeros_like(p)
    for n in range(rows):
        for i in range(classes):
            pos, neg = z[n, i] == POSITIVE, z[n, i] == NEGATIVE
            e = 0.1 if name.endswith("_ls") else 0.0
            if name in ("bce", "an", "bce_ls", "an_ls"):
                m[n, i] = ((1 - e) * nl(p[n, i]) + e * nl(1 - p[n, i]) if pos
                           else (1 - e) * nl(1 - p[n, i]) + e * nl(p[n, i]))
            elif name == "wan":
                m[n, i] = nl(p[n, i]) if pos else nl(1 - p[n, i]) / (classes - 1)
            elif name in ("iu", "iun"):
                m[n, i] = nl(p[n, i]) if pos else nl(1 - p[n, i]) if neg else 0
            elif name == "epr":
                m[n, i] = nl(p[n, i]) if pos else 0
            elif name == "pr" and pos:
                m[n, i] = sum(max(0, 1 - p[n, i] + p[n, j]) for j in range(classes) if z[n, j] != POSITIVE)
    penalty = ((p.sum(1).mean() - 1.5) / classes) ** 2 if name == "epr" else 0
    return m.sum() / (rows * classes) + penalty


def random_case(name, seed):
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 3, (6, 9))
    z = rng.choice([POSITIVE, NEGATIVE] if name.startswith("bce") else [POSITIVE, NEGATIVE, UNKNOWN], (6, 9))
    z[:, 0], z[:, 1] = POSITIVE, NEGATIVE
    return a, z.astype(np.int8)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.paper.startswith("Cole") and n != "role"])
def test_value_and_gradient_equal_the_formula(name):
    a, z = random_case(name, 3)
    logits = torch.tensor(a, requires_grad=True)
    value = total(name, logits, z)
    assert value.item() == pytest.approx(oracle(name, a, z), rel=1e-9)
    value.backward()
    for n, i in ((0, 0), (1, 1), (3, 5), (5, 8)):
        bumped = a.copy()
        bumped[n, i] += 1e-6
        slope = (oracle(name, bumped, z) - oracle(name, a, z)) / 1e-6
        assert float(logits.grad[n, i]) == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.paper.startswith("Cole") and n != "role"])
def test_extreme_logits_and_odd_shapes_stay_finite(name):
    for shape in ((1, 1), (1, 4), (3, 1), (0, 4)):
        labels = np.zeros(shape, np.int8) if name.startswith("bce") else np.full(shape, UNKNOWN, np.int8)
        labels[:, :1] = NEGATIVE if name in ("iu", "iun") else labels[:, :1]
        for value in (80.0, -80.0):
            logits = torch.full(shape, value, dtype=torch.bfloat16, requires_grad=True)
            task = task_of(labels if len(labels) else np.zeros((1, shape[1]), np.int8))
            method = build_method({"name": name}, replace(task, expected_positives=K))
            terms = method.loss(Outputs(logits.float()), batch_of(labels), step_of(max(1, shape[0])))
            loss = terms.per_sample.sum() + (0 if terms.coupled is None else terms.coupled)
            loss.backward()
            assert torch.isfinite(loss)
            assert torch.isfinite(logits.grad).all()


def test_bad_settings_are_named():
    task = task_of(OBSERVED)
    with pytest.raises(UserError, match="did you mean 'an_ls'"):
        build_method({"name": "an_l"}, task)
    with pytest.raises(UserError, match="expected_positives"):
        build_method({"name": "epr"}, task)
    with pytest.raises(UserError, match="did you mean 'smoothing'"):
        build_method({"name": "an_ls", "smothing": 0.2}, task)
    with pytest.raises(UserError, match="needs full labels"):
        build_method({"name": "bce"}, task)
    with pytest.raises(UserError, match="verified negatives"):
        build_method({"name": "iu"}, task_of(np.where(OBSERVED == NEGATIVE, UNKNOWN, OBSERVED)))
