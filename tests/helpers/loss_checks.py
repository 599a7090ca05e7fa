"""Checks that every stateless method must pass: value and gradient by formula, and odd inputs.

An oracle is `oracle(a, z, fixed)`: the global loss in float64 of logits `a` and labels `z`, where whatever has no
gradient (focal weights, selections, schedules of p) is computed from the logits `fixed`.
"""

from __future__ import annotations

import numpy as np
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs
from tests.helpers.oracles import batch_of, step_of, task_of

SHAPES = ((1, 1), (1, 4), (3, 1), (5, 7), (0, 4))


def total(name, logits, labels, epoch=0, epochs=10, **settings):
    """The global loss of one rank, as the loop adds it up."""
    method = build_method({"name": name, **settings}, task_of(np.asarray(labels)))
    terms = method.loss(Outputs(logits), batch_of(np.asarray(labels)), step_of(max(1, len(labels)), epoch, epochs))
    assert terms.per_sample.shape == (len(labels),)
    return terms.per_sample.sum() / max(1, len(labels)) + (0 if terms.coupled is None else terms.coupled)


def random_case(seed, shape=(6, 9)):
    """Rows 0 and 1 have no positives, row 1 nothing known, row 2 everything known; the rest is mixed."""
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 3, shape)
    z = rng.choice([POSITIVE, NEGATIVE, UNKNOWN], shape, p=[0.2, 0.2, 0.6]).astype(np.int8)
    z[0] = np.where(z[0] == POSITIVE, UNKNOWN, z[0])
    z[1] = UNKNOWN
    z[2] = np.where(z[2] == UNKNOWN, NEGATIVE, z[2])
    z[3, :2] = POSITIVE, NEGATIVE
    return a, z


def assert_formula(name, oracle, case, epoch=0, epochs=10, **settings):
    """Value to 1e-9 and every entry's gradient against central differences."""
    a, z = case
    logits = torch.tensor(a, requires_grad=True)
    value = total(name, logits, z, epoch, epochs, **settings)
    expected = oracle(a, z, a)
    np.testing.assert_allclose(value.item(), expected, rtol=1e-9, atol=1e-12)
    value.backward()
    slopes = np.zeros_like(a)
    for place in np.ndindex(*a.shape):
        up, down = a.copy(), a.copy()
        up[place] += 1e-5
        down[place] -= 1e-5
        slopes[place] = (oracle(up, z, a) - oracle(down, z, a)) / 2e-5
    np.testing.assert_allclose(logits.grad.numpy(), slopes, rtol=1e-5, atol=1e-7 * max(1, abs(expected)))


def assert_finite(name, epochs=(0, 1, 9), **settings):
    """Loss and gradients of bfloat16 logits of ±80 and 0, all-unknown and all-known rows, L = 1, batches of 1 and 0."""
    for shape in SHAPES:
        for label in (UNKNOWN, POSITIVE, NEGATIVE):
            for size in (80.0, -80.0, 0.0):
                for epoch in epochs:
                    logits = torch.full(shape, size, dtype=torch.bfloat16, requires_grad=True)
                    loss = total(name, logits.float(), np.full(shape, label, np.int8), epoch, **settings)
                    loss.backward()
                    assert torch.isfinite(loss), (shape, label, size, epoch)
                    assert torch.isfinite(logits.grad).all(), (shape, label, size, epoch)


def assert_float32_close(name, oracle, seed=11, **settings):
    """Float32 logits give the float64 formula to five digits."""
    a, z = random_case(seed, (8, 40))
    a = a.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(total(name, torch.tensor(a, dtype=torch.float32), z, **settings).item(),
                               oracle(a, z, a), rtol=2e-5)


def sigmoid(a):
    return 1 / (1 + np.exp(-np.asarray(a, np.float64)))
