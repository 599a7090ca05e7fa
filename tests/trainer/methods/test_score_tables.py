"""Methods of imported score tables: on the real stores they equal their formulas; wrong tables are refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.tools.cli import main
from lacuna.trainer.methods import build_method
from tests.helpers.gr_schedule import schedule_by_formula
from tests.helpers.loss_checks import sigmoid
from tests.helpers.state.harness import CLASSES, SAMPLES, Harness, labels_of, make_source

NAMES = ("scores", "global", "crop_max", "crop_min")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_source(str(tmp_path_factory.mktemp("state") / "shards"))


@pytest.fixture(scope="module")
def tables(source, tmp_path_factory):
    """(URL of the imported store, {name: float64 [SAMPLES, CLASSES] as stored})"""
    folder = tmp_path_factory.mktemp("tables")
    rng, index = np.random.default_rng(5), source.index
    keys = np.array([key for shard in range(len(index.shards)) for key in index.members(shard).keys])
    whole = rng.dirichlet(np.full(CLASSES, 0.3), SAMPLES)
    made = {"scores": whole, "global": whole, "crop_max": np.minimum(1, whole + rng.random(whole.shape) * 0.5),
            "crop_min": whole * rng.random(whole.shape)}
    order = rng.permutation(SAMPLES)  # a table's rows are in any order
    for name, values in made.items():
        np.savez(folder / f"{name}.npz", keys=keys[order], scores=values[order].astype(np.float32),
                 classes=np.array(index.classes))
    arguments = [f"{name}={folder / name}.npz" for name in NAMES]
    assert main(["import-scores", *arguments, "--shards", index.url, "--out", str(folder / "store")]) == 0
    return str(folder / "store"), {name: values.astype(np.float16).astype(float) for name, values in made.items()}


def harness_for(source, folder, body, k=None):
    return Harness(source, folder / "store", body, k=k)


def nl(p, epsilon=1e-5):
    return -math.log(p + epsilon)


def entry_by_entry(harness, formula, epochs=2):
    """Compare every sample's loss with the mean of formula(sample, class, p, label, epoch)."""
    z = labels_of(harness.source)

    def on_step(samples, batch, outputs, step, terms):
        p = sigmoid(outputs.logits.double().numpy())
        for row, n in enumerate(samples):
            expected = np.mean([formula(n, i, p[row, i], z[n, i], step.epoch) for i in range(CLASSES)])
            assert float(terms.per_sample[row]) == pytest.approx(expected, rel=2e-4, abs=1e-6)
        assert not terms.rows

    for epoch in range(epochs):
        harness.epoch(epoch, on_step)
    assert harness.state.session.metrics.chunks_written == 0, "a table is never copied into the run's store"
    harness.state.close()


def test_vlpl(source, tables, tmp_path):
    url, table = tables
    pseudo = [0]

    def formula(n, i, p, label, epoch):
        if label == POSITIVE:
            return nl(p)
        if label == NEGATIVE:
            return nl(1 - p)
        if table["scores"][n, i] > 0.3:
            pseudo[0] += 1
            return 0.7 * (0.9 * nl(p) + 0.1 * nl(1 - p))
        return -0.2 * (p * nl(p) + (1 - p) * nl(1 - p))

    entry_by_entry(harness_for(source, tmp_path, {"name": "vlpl", "scores": url, "entropy_weight": 0.2}), formula)
    assert pseudo[0] > 100


def gpr_formula(score, top_k, threshold, most, least):
    def formula(n, i, p, label, epoch):
        w, b, mu, s = schedule_by_formula(epoch + 1, 9, 0)
        v = math.exp(-0.5 * ((p - mu) / s) ** 2)
        if label != UNKNOWN:
            return nl(p if label == POSITIVE else 1 - p, 1e-7)
        row = score(n)
        if row[i] >= threshold and i in np.argsort(-row, kind="stable")[:top_k]:
            return (1 - min(max(v, 1 - most), 1 - least)) * (0.9 * nl(p, 1e-7) + 0.1 * nl(1 - p, 1e-7))
        k = sigmoid(w * p + b)
        return v * (k * (1 - p**0.01) / 0.01 + (1 - k) * p)
    return formula


def test_gpr(source, tables, tmp_path):
    url, table = tables
    body = {"name": "gpr", "scores": url, "threshold": 0.2, "top_k": 2, "most": 0.8, "least": 0.3, "regularizer": 0}
    entry_by_entry(harness_for(source, tmp_path, body), gpr_formula(lambda n: table["scores"][n], 2, 0.2, 0.8, 0.3))


def test_gpr_pulls_towards_k(source, tables, tmp_path):
    harness = harness_for(source, tmp_path, {"name": "gpr", "scores": tables[0], "regularizer": 0.5}, k=2.5)

    def on_step(samples, batch, outputs, step, terms):
        predicted = torch.sigmoid(outputs.logits).sum(1).mean().item()
        assert terms.coupled.item() == pytest.approx(0.5 * ((predicted - 2.5) / CLASSES) ** 2, rel=1e-5)

    harness.epoch(0, on_step)
    harness.state.close()


def test_aevlp(source, tables, tmp_path):
    url, table = tables
    z, chosen = labels_of(source), set()

    def damp(n):
        eta = min([table["global"][n, i] for i in range(CLASSES) if z[n, i] == POSITIVE] + [0.1])
        best, worst = table["crop_max"][n], table["crop_min"][n]
        row = np.array([(table["global"][n, i] + (best[i] if best[i] > eta else worst[i])) / 2 for i in range(CLASSES)])
        chosen.update((n, i) for i in range(CLASSES) if best[i] <= eta)
        return row

    body = {"name": "aevlp", "scores": url, "threshold": 0.25, "eta": 0.1, "regularizer": 0, "least": 0.5}
    entry_by_entry(harness_for(source, tmp_path, body), gpr_formula(damp, 3, 0.25, 0.7, 0.5))
    assert chosen, "the smallest crop was never used"


@pytest.mark.parametrize("crops", [False, True])
def test_ccd(source, tables, tmp_path, crops):
    url, table = tables
    sums, counts = np.zeros(CLASSES), np.zeros(CLASSES)
    sure = []
    for row in table["scores"]:
        share = row / row.sum()
        sure.append(-sum(x * math.log(x) for x in share if x > 0) <= 1.2)
        if sure[-1]:
            sums[row.argmax()] += row.max()
            counts[row.argmax()] += 1
    bias = np.where(counts > 0, sums / np.maximum(counts, 1), 1)

    def formula(n, i, p, label, epoch):
        target = min(max(table["scores"][n, i], 0.05) / bias[i], 1)
        if crops and epoch >= 1:
            target = min(0.6 * target + 0.4 * max(table["crop_max"][n, i], 0.05) / bias[i], 1)
        target = {POSITIVE: 1, NEGATIVE: 0}.get(int(label), target)
        weight = 0.3 if epoch >= 1 and not sure[n] else 1
        return weight * (-target * math.log(p) - (1 - target) * math.log(1 - p))

    body = {"name": "ccd", "scores": url, "max_entropy": 1.2, "floor": 0.05, "crops": crops, "late_epoch": 1,
            "ratio": 0.6, "consistency": 0, "unsure_weight": 0.3}
    harness = harness_for(source, tmp_path, body)
    entry_by_entry(harness, formula)
    np.testing.assert_allclose(harness.method.state()["bias"].numpy(), bias, rtol=1e-6)
    assert (counts > 0).any()
    assert counts.sum() < SAMPLES


def test_ccd_takes_its_bias_from_the_subset(source, tables, tmp_path):
    url, table = tables
    kept = [np.arange(shard.count) % 3 != 1 for shard in source.index.shards]
    Subset.from_masks(source.index, "most", kept, {}).save()
    some = ShardSource.load(source.index.url, source.sidecar.name, "most")
    harness = harness_for(some, tmp_path, {"name": "ccd", "scores": url, "max_entropy": 9.0, "consistency": 0})
    harness.epoch(0)
    rows = table["scores"][np.concatenate(kept)]
    for c in range(CLASSES):
        top = rows[rows.argmax(1) == c, c]
        assert float(harness.method.bias[c]) == pytest.approx(top.mean() if len(top) else 1, rel=1e-5)
    harness.state.close()


def test_wrong_tables_are_refused(source, tables, tmp_path):
    url, _ = tables
    harness = harness_for(source, tmp_path, {"name": "vlpl", "scores": url})
    task = harness.task
    harness.state.close()
    with pytest.raises(UserError, match=r"'vlpl' needs tables of scores: scores\. Make"):
        build_method({"name": "vlpl"}, task)
    with pytest.raises(UserError, match="no state store here"):
        build_method({"name": "vlpl", "scores": str(tmp_path / "nowhere")}, task).fields()
    with pytest.raises(UserError, match=r"was imported for the shard index .*data\.train has other"):
        build_method({"name": "vlpl", "scores": url}, replace(task, data={"shard index": "other"})).fields()
    np.savez(tmp_path / "t.npz", scores=np.zeros((SAMPLES, CLASSES)), classes=np.array(source.index.classes),
             keys=np.array([k for s in range(len(source.index.shards)) for k in source.index.members(s).keys]))
    only = str(tmp_path / "only")
    assert main(["import-scores", str(tmp_path / "t.npz"), "--shards", source.index.url, "--out", only]) == 0
    with pytest.raises(UserError, match=r"lacks the tables \['global', 'crop_max', 'crop_min'\]; it has \['scores'\]"):
        build_method({"name": "aevlp", "scores": only, "regularizer": 0}, task).fields()
    first, second = (build_method({"name": "vlpl", "scores": u}, task).fields()[0] for u in (url, only))
    assert first.initial != second.initial, "another table is another field"
