"""Proves that CAP's pseudo-labels are the highest and lowest scores of every class, in the labelled images' shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.index import SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs
from tests.helpers.loss_checks import sigmoid
from tests.helpers.oracles import LOGITS, batch_of, step_of, task_of
from tests.helpers.state.harness import CLASSES, SAMPLES, Harness, labels_of, make_source, pass_logits

BODY = {"name": "cap", "warmup_epochs": 1, "positive_share": 0.9, "negative_share": 0.8}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, ShardSource]:
    """Partial labels alone, and the same with every sixth image labelled completely."""
    partial = make_source(str(tmp_path_factory.mktemp("cap") / "shards"))
    writer, rng = SidecarWriter(partial.index, "mixed", UNKNOWN, {}), np.random.default_rng(3)
    for shard in range(len(partial.index.shards)):
        dense = partial.sidecar.labels(shard).dense(CLASSES)
        full = np.where(rng.random(dense.shape) < np.linspace(0.1, 0.5, CLASSES), POSITIVE, NEGATIVE)
        dense[::6] = full[::6]
        writer.write(shard, SparseLabels.from_dense(dense))
    writer.close()
    return {"partial": partial, "mixed": ShardSource.load(partial.index.url, "mixed", None)}


def asl(p: np.ndarray, is_positive: np.ndarray) -> np.ndarray:
    shifted = np.clip(p - 0.05, 0, None)
    return np.where(is_positive, -np.log(np.maximum(p, 1e-8)),
                    -(shifted**4) * np.log(np.maximum(1 - shifted, 1e-8)))


@pytest.mark.parametrize("kind", ["partial", "mixed"])
def test_pseudo_labels_by_sorting(sources, tmp_path, kind):
    source = sources[kind]
    harness, z = Harness(source, tmp_path / "store", BODY), labels_of(source)
    whole = (z != UNKNOWN).all(1)
    known = z[whole] if whole.any() else None
    labels = np.full(z.shape, UNKNOWN)

    def on_step(samples, batch, outputs, step, terms):
        p = sigmoid(outputs.logits.double().numpy())
        now = np.where(z[samples] == UNKNOWN, labels[samples], z[samples])
        entries = np.where(now == UNKNOWN, 0, asl(p, now == POSITIVE))
        np.testing.assert_allclose(terms.per_sample.numpy(), entries.sum(1) * len(samples), rtol=2e-4)

    for epoch in range(4):
        labels[:] = UNKNOWN
        if epoch >= 1:
            scores = pass_logits(epoch, np.arange(SAMPLES)).double().numpy()
            for c in range(CLASSES):
                rows = np.flatnonzero(z[:, c] == UNKNOWN)
                of_class = known[:, c] if known is not None else z[:, c][z[:, c] != UNKNOWN]
                share = np.mean(of_class == POSITIVE)
                order = rows[np.argsort(-scores[rows, c])]
                labels[order[: int(0.9 * share * len(rows) + 1e-9)], c] = POSITIVE
                lowest = int(0.8 * (1 - share) * len(rows) + 1e-9)
                labels[order[len(rows) - lowest:], c] = NEGATIVE
        harness.epoch(epoch, on_step)
    assert (labels == POSITIVE).sum() > 50
    assert (labels == UNKNOWN).sum() > 50
    harness.state.close()


def test_cutoffs_are_in_the_checkpoint(sources, tmp_path):
    harness = Harness(sources["mixed"], tmp_path / "store", BODY)
    assert harness.method.state() == {}
    np.testing.assert_array_equal(harness.method.initial_counts()["score"], harness.state.session.histogram("score")[0])
    harness.epoch(0)
    harness.epoch(1)
    fresh = build_method(BODY, harness.task)
    fresh.load_state(harness.method.state())
    for kind in ("positive", "negative"):
        for name, value in harness.method.cutoffs[kind].to_arrays().items():
            np.testing.assert_array_equal(value, fresh.cutoffs[kind].to_arrays()[name])
    harness.state.close()


def test_a_class_without_labels_gets_none():
    z = np.full((10, 3), UNKNOWN, np.int8)
    z[:4, 0], z[4:6, 0], z[:2, 1] = POSITIVE, NEGATIVE, NEGATIVE
    highest, rest = build_method(BODY, task_of(z)).quotas(np.zeros(3, np.int64), 0)
    assert highest.tolist() == [int(0.9 * 4 / 6 * 4), 0, 0]
    assert rest.tolist() == [4 - int(0.8 * 2 / 6 * 4), 8 - int(0.8 * 8), 10]


def test_golden_values():
    """Known labels alone, in the warm-up: ASL of the golden batch without its unknown entries."""
    z = np.array([[1, 0, -1, 0], [0, 1, 0, -1]], np.int8)
    method = build_method({"name": "cap"}, task_of(z))
    terms = method.loss(Outputs(torch.tensor(LOGITS)), batch_of(z), step_of(2))
    assert terms.per_sample.sum().item() / 2 == pytest.approx(0.333478, abs=1e-6)
