"""LL-Cp, EM+APL, MIME and CRISP on the real store equal their definitions over the whole matrix, epoch by epoch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import EpochStart, Outputs, Scored
from lacuna.trainer.methods.crisp import estimated_priors
from lacuna.trainer.sample_state import NoState
from lacuna.trainer.world import World
from tests.helpers.loss_checks import sigmoid
from tests.helpers.oracles import batch_of, step_of, task_of
from tests.helpers.state.harness import CLASSES, SAMPLES, Harness, labels_of, logits_at, make_source, pass_logits

EVERY = np.arange(SAMPLES)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ShardSource:
    return make_source(str(tmp_path_factory.mktemp("passes") / "shards"))


def nl(p):
    return -np.log(p + 1e-5)


def test_ll_cp_keeps_what_it_corrected(source, tmp_path):
    """Per batch: AN on the current labels; the k largest losses of unknown entries are flipped, then and for good."""
    harness = Harness(source, tmp_path / "store", {"name": "ll_cp", "delta_percent": 3.0})
    z = labels_of(source)
    current = np.where(z == POSITIVE, 1, 0)

    def on_step(samples, batch, outputs, step, terms):
        p = sigmoid(outputs.logits.numpy())
        entries = np.where(current[samples] == 1, -np.log(p), -np.log(1 - p))
        if step.epoch > 0:
            k = math.ceil(len(samples) * CLASSES * 0.03 - 1e-9)
            open_entries = (z[samples] == UNKNOWN) & (current[samples] == 0)
            ranked = np.where(open_entries, entries, 0)
            large = open_entries & (ranked >= np.sort(ranked, axis=None)[-k])
            entries = np.where(large, -np.log(p), entries)
            current[samples] |= large
        np.testing.assert_allclose(terms.per_sample.numpy(), entries.mean(1), rtol=2e-5)

    for epoch in range(4):
        harness.epoch(epoch, on_step)
        np.testing.assert_array_equal(harness.table("corrected"), (current == 1) & (z != POSITIVE))
    assert 3 * SAMPLES * CLASSES * 0.03 * 0.9 < harness.table("corrected").sum() < SAMPLES * CLASSES
    assert not harness.table("corrected")[z != UNKNOWN].any()
    harness.state.close()


@pytest.mark.parametrize("warmup", [1, 6])
def test_em_apl_takes_the_lowest_predictions_of_every_class(source, tmp_path, warmup):
    """Naive: sort the predictions of every class over all samples; ties (equal codes) may fall either way."""
    body = {"name": "em_apl", "warmup_epochs": warmup, "pseudo_weight": 0.7, "entropy_weight": 0.3}
    harness = Harness(source, tmp_path / "store", body)
    z = labels_of(source)
    quota = (0.9 * (z == UNKNOWN).sum(0) / (9 - warmup)).astype(int)
    soft = np.full(z.shape, np.nan)  # frozen targets of assigned entries

    def on_step(samples, batch, outputs, step, terms):
        p = sigmoid(outputs.logits.double().numpy())
        assigned = ~np.isnan(soft[samples])
        entries = np.where(z[samples] == POSITIVE, nl(p), nl(1 - p))
        entries = np.where(z[samples] == UNKNOWN, -0.3 * (p * nl(p) + (1 - p) * nl(1 - p)), entries)
        target = np.nan_to_num(soft[samples])
        entries = np.where(assigned, 0.7 * (target * nl(p) + (1 - target) * nl(1 - p)), entries)
        np.testing.assert_allclose(terms.per_sample.numpy(), entries.mean(1), rtol=2e-3, atol=2e-4)

    for epoch in range(9):
        if epoch >= warmup:
            scores = pass_logits(epoch, EVERY).double().numpy()
            for i in range(CLASSES):
                candidates = np.flatnonzero((z[:, i] == UNKNOWN) & np.isnan(soft[:, i]))
                order = candidates[np.argsort(scores[candidates, i], kind="stable")]
                soft[order[: quota[i]], i] = sigmoid(scores[order[: quota[i]], i])
        harness.epoch(epoch, on_step)
        stored = harness.table("score")
        np.testing.assert_array_equal(stored < -1, ~np.isnan(soft))
        np.testing.assert_allclose(sigmoid(-(stored + 32))[stored < -1], soft[stored < -1], rtol=3e-3)
    assert ((~np.isnan(soft)).sum(0) == quota * (9 - warmup)).all()
    assert harness.state.session.metrics.chunks_read > 8, "state was never evicted: the test proves nothing"
    harness.state.close()


def test_em_apl_cutoffs_are_in_the_checkpoint(source, tmp_path):
    harness = Harness(source, tmp_path / "store", {"name": "em_apl", "warmup_epochs": 1})
    assert harness.method.state() == {}
    np.testing.assert_array_equal(harness.method.initial_counts()["score"], harness.state.session.histogram("score")[0])
    harness.epoch(0)
    harness.epoch(1)
    fresh = build_method({"name": "em_apl", "warmup_epochs": 1}, harness.task)
    fresh.load_state(harness.method.state())
    for name, value in harness.method.cutoffs.to_arrays().items():
        np.testing.assert_array_equal(value, fresh.cutoffs.to_arrays()[name])
    harness.state.close()


def test_mime_makes_confident_entries_positive_for_good(source, tmp_path):
    harness = Harness(source, tmp_path / "store", {"name": "mime", "threshold": 0.7, "warmup_epochs": 2})
    z = labels_of(source)
    current = z == POSITIVE

    def on_step(samples, batch, outputs, step, terms):
        p = sigmoid(outputs.logits.numpy())
        np.testing.assert_allclose(terms.per_sample.numpy(), np.where(current[samples], nl(p), nl(1 - p)).mean(1),
                                   rtol=1e-4)

    for epoch in range(4):
        if epoch >= 2:
            current |= (z == UNKNOWN) & (sigmoid(pass_logits(epoch, EVERY).numpy()) > 0.7)
        harness.epoch(epoch, on_step)
        np.testing.assert_array_equal(harness.table("corrected"), current & (z != POSITIVE))
    assert harness.table("corrected").any()
    harness.state.close()


def naive_prior(scores, annotated, delta, tau):
    """One class; every score as a threshold, the highest of equally good ones."""
    n, n_j = len(scores), int(annotated.sum())
    if not n_j:
        return 0.0
    best = (math.inf, 0.0)
    for z in sorted(set(scores), reverse=True):
        q, q_p = (scores >= z).mean(), (scores[annotated] >= z).mean()
        if q_p:
            slack = math.sqrt(math.log(4 / delta) / (2 * n)) + math.sqrt(math.log(4 / delta) / (2 * n_j))
            best = min(best, (q / q_p + (1 + tau) / q_p * slack, q / q_p), key=lambda found: found[0])
    return min(best[1], 1.0)


@pytest.mark.parametrize("bins", [16, 1024])
def test_crisp_priors(bins):
    rng = np.random.default_rng(3)
    scores = rng.integers(0, bins, (300, 5))
    annotated = rng.random((300, 5)) < np.array([0.3, 0.05, 0.0, 1.0, 0.01]) * (scores > bins * 0.4)
    every, some = (np.stack([np.bincount(scores[mask[:, j], j], minlength=bins) for j in range(5)])
                   for mask in (np.ones_like(annotated), annotated))
    found = estimated_priors(torch.from_numpy(every), torch.from_numpy(some), 0.05, 0.01)
    expected = [naive_prior(scores[:, j], annotated[:, j], 0.05, 0.01) for j in range(5)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert expected[2] == 0
    assert expected[0] > 0.2


@pytest.mark.parametrize("mean", ["batch", "data"])
def test_crisp_over_epochs(source, tmp_path, mean):
    body = {"name": "crisp", "bins": 64, "positive_mean": mean, "delta": 0.5}
    method, z = build_method(body, task_of(labels_of(source))), labels_of(source)

    def scored(epoch):
        """CRISP keeps no rows: batches of uneven size are enough."""
        for rows in np.array_split(EVERY, 7):
            yield Scored(batch_of(z[rows]), Outputs(pass_logits(epoch, rows)), None)

    for epoch in range(3):
        method.begin_epoch(EpochStart(0, epoch, 9, epoch, World(torch.device("cpu")), NoState(),
                                      lambda epoch=epoch: scored(epoch)))
        rows = EVERY[epoch * 40 : epoch * 40 + 30]
        logits = logits_at(epoch, rows).double().requires_grad_()
        terms = method.loss(Outputs(logits), batch_of(z[rows]), step_of(len(rows), epoch, 9))
        value = terms.per_sample.mean() + (0 if terms.coupled is None else terms.coupled)
        value.backward()
        p, pos = sigmoid(logits.detach().numpy()), z[rows] == POSITIVE
        if epoch == 0:
            assert method.state() == {}
            assert value.item() == pytest.approx(np.where(pos, nl(p), nl(1 - p)).mean())
            continue
        bins = np.clip(((pass_logits(epoch, EVERY).numpy() + 16) * 2).astype(int), 0, 63)
        pi = np.array([naive_prior(bins[:, j], z[:, j] == POSITIVE, 0.5, 0.01) for j in range(CLASSES)])
        np.testing.assert_allclose(method.state()["priors"].numpy(), pi, rtol=1e-6)
        below = pos.sum(0) if mean == "batch" else (z == POSITIVE).sum(0) / SAMPLES * len(rows)
        risk, slope = 0.0, np.where(z[rows] == NEGATIVE, 1 / len(rows), 0.0)
        for j in range(CLASSES):
            far = p[:, j].mean() - pi[j]
            risk += abs(far) + (2 * pi[j] * (1 - p[pos[:, j], j]).sum() / below[j] if pos[:, j].any() else 0)
            slope[:, j] += np.sign(far) / len(rows) - np.where(pos[:, j], 2 * pi[j] / max(below[j], 1e-9), 0)
        risk += p[z[rows] == NEGATIVE].sum() / len(rows)
        assert value.item() == pytest.approx(risk / CLASSES, rel=1e-6)
        np.testing.assert_allclose(logits.grad.numpy(), slope * p * (1 - p) / CLASSES, rtol=1e-6, atol=1e-12)
    fresh = build_method(body, method.task)
    fresh.load_state(method.state())
    assert torch.equal(fresh.priors, method.priors)


def test_crisp_says_when_the_classifier_cannot_rank(caplog):
    """Scores that tell nothing: every prior is estimated near 1."""
    z = np.full((60, 4), UNKNOWN, np.int8)
    z[np.arange(60), np.arange(60) % 4] = POSITIVE
    method = build_method({"name": "crisp"}, task_of(z))
    pass_over = lambda: iter([Scored(batch_of(z), Outputs(torch.zeros(60, 4)), None)])  # noqa: E731
    method.begin_epoch(EpochStart(0, 1, 9, 1, World(torch.device("cpu")), NoState(), pass_over))
    assert (method.priors == 1).all()
    assert "raise method.warmup_epochs" in caplog.text
