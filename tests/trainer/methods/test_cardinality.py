"""EN's per-image selection deals numbers of positives out by sorting, and picks each image's best unknown entries."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from tests.helpers.loss_checks import sigmoid
from tests.helpers.state.harness import SAMPLES, Harness, labels_of, make_source

SHARES = (0.5, 0.0, 0.3, 0.2)


@pytest.mark.parametrize("name", ["en", "ep"])
def test_selection_per_image(tmp_path, name):
    source = make_source(str(tmp_path / "shards"))
    harness = Harness(source, tmp_path / "store", {"name": name, "cardinality": SHARES})
    z = labels_of(source)
    numbers = np.repeat([1, 3, 4], [120, 72, 48])  # of 240 images
    for epoch in range(3):
        scores = harness.table("score")
        codes = np.rint(scores * 255).astype(int)
        k = np.empty(SAMPLES, int)
        k[sorted(range(SAMPLES), key=lambda n: (codes[n].sum(), n))] = numbers
        expected = z == POSITIVE
        for n in range(SAMPLES if epoch else 0):
            best = sorted(np.flatnonzero(z[n] == UNKNOWN), key=lambda i: (-codes[n, i], i))
            expected[n, best[: max(0, k[n] - (z[n] == POSITIVE).sum())]] = True

        def on_step(samples, batch, outputs, step, terms, expected=expected):
            p = sigmoid(outputs.logits.double().numpy())
            taken = expected[samples] if name == "ep" else z[samples] == POSITIVE
            entries = np.where(taken, -np.log(p), np.where(expected[samples], 0, -np.log(1 - p)))
            np.testing.assert_allclose(terms.per_sample.numpy(), entries.mean(1), rtol=1e-4)

        harness.epoch(epoch, on_step)
        if epoch:
            assert (expected.sum(1) == np.maximum(k, 1)).all()
    fresh = build_method({"name": name, "cardinality": SHARES}, harness.task)
    fresh.load_state(harness.method.state())
    np.testing.assert_array_equal(fresh.cardinalities.bounds, harness.method.cardinalities.bounds)
    assert fresh.cardinalities.max_rows == harness.method.cardinalities.max_rows
    harness.state.close()


def test_shares_must_be_shares(tmp_path):
    task = Harness(make_source(str(tmp_path / "shards")), tmp_path / "store", {"name": "an_cl"}).task
    for wrong in ((0.0, 0.0), (1.0, -0.1)):
        with pytest.raises(UserError, match=r"method\.cardinality = .*shares of images"):
            build_method({"name": "en", "cardinality": wrong}, task)
