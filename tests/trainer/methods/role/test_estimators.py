"""ROLE's estimators topk, factorized and network equal naive versions that hold every sample in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs, Step
from lacuna.trainer.methods.role import lazy_adam
from tests.helpers.oracles import batch_of
from tests.helpers.state.harness import CLASSES, SAMPLES, Harness, labels_of, logits_at, make_source, role_loss

K, LR = 2.5, 0.05
BODY = {"name": "role", "lr": LR}
UNTRACKED_PHI = -11.512915


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ShardSource:
    return make_source(str(tmp_path_factory.mktemp("estimators") / "shards"))


def spread(ids: np.ndarray, values: np.ndarray, classes: int) -> np.ndarray:
    """Tracked values [n, k] at their classes [n, L], 0 elsewhere."""
    found = np.zeros((len(ids), classes))
    rows, places = np.nonzero(ids >= 0)
    found[rows, ids[rows, places]] = values[rows, places]
    return found


def replayed(harness: Harness, name: str, prefix: str) -> torch.Tensor:
    """The field as it stands after the last step, every row brought up to date."""
    tables = [torch.from_numpy(harness.table(n)).double() for n in (name, f"{prefix}_m", f"{prefix}_v")]
    last = harness.table("visit")[:, 1].astype(np.int64)
    return lazy_adam.replay(*tables, last, harness.number, LR)[0]


class NaiveTopK:
    """The whole matrix with a mask of what is tracked, every row moved by Adam at every step."""

    def __init__(self, z: np.ndarray, start: np.ndarray, k: int):
        self.z, self.start, self.k = z, start, k
        self.phi, self.m, self.v = start.astype(np.float64), np.zeros(z.shape), np.zeros(z.shape)
        self.tracked, self.steps, self.evictions = z == POSITIVE, 0, 0

    def choose(self, sample: int, logits: np.ndarray) -> None:
        mine, z = self.tracked[sample], self.z[sample]
        others = [c for c in np.argsort(-logits) if not mine[c]]
        if mine.sum() < self.k:  # the first visit
            others = [c for c in others if z[c] != NEGATIVE] + [c for c in others if z[c] == NEGATIVE]
            mine[others[: self.k - mine.sum()]] = True
            self.phi[sample] = self.start[sample]
            return
        for c in others:
            if z[c] == NEGATIVE:
                continue
            worst = min((e for e in np.flatnonzero(mine) if z[e] != POSITIVE), key=lambda e: self.phi[sample, e])
            value = min(logits[c], 0.405465)
            if value <= self.phi[sample, worst]:
                break
            mine[worst], mine[c] = False, True
            self.phi[sample, c], self.m[sample, c], self.v[sample, c] = value, 0, 0
            self.evictions += 1

    def step(self, samples: np.ndarray, logits: torch.Tensor) -> float:
        for sample, own in zip(samples, logits.numpy(), strict=True):
            self.choose(sample, own)
        dense = torch.tensor(np.where(self.tracked, self.phi, UNTRACKED_PHI)[samples], requires_grad=True)
        value = role_loss(dense, logits.double(), torch.from_numpy(self.z[samples]), K)
        value.backward()
        gradient = np.zeros(self.phi.shape)
        gradient[samples] = np.where(self.tracked[samples], dense.grad.numpy(), 0)
        self.steps += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        scale = np.sqrt(self.v / (1 - 0.999**self.steps)) + 1e-8
        self.phi -= LR * self.m / (1 - 0.9**self.steps) / scale
        return value.item()


def test_topk_equals_the_naive_mask_over_the_whole_matrix(source, tmp_path):
    k, z = 3, labels_of(source)
    start = Harness(source, tmp_path / "dense", BODY, k=K).table("phi")
    harness = Harness(source, tmp_path / "store", {**BODY, "estimator": "topk", "top_k": k}, k=K)
    naive = NaiveTopK(z, start, k)

    def on_step(samples, batch, outputs, step, terms):
        value = naive.step(samples, outputs.logits)
        assert (terms.per_sample.sum() / len(samples) + terms.coupled).item() == pytest.approx(value, abs=2e-5)

    for epoch in range(4):
        harness.epoch(epoch, on_step)
    ids = harness.table("phi_ids")
    assert naive.evictions > SAMPLES / 4, "hardly anything was evicted: the test proves little"
    np.testing.assert_array_equal(spread(ids, np.ones(ids.shape), CLASSES) > 0, naive.tracked)
    found = spread(ids, replayed(harness, "phi_values", "phi").numpy(), CLASSES)
    np.testing.assert_allclose(found[naive.tracked], naive.phi[naive.tracked], atol=2e-4)
    assert naive.tracked[z == POSITIVE].all()
    assert harness.state.session.metrics.chunks_read > 8, "state was never evicted"
    harness.state.close()


def test_topk_of_all_classes_is_dense(source, tmp_path):
    dense = Harness(source, tmp_path / "dense", BODY, k=K)
    tops = Harness(source, tmp_path / "tops", {**BODY, "estimator": "topk", "top_k": CLASSES}, k=K)
    values: dict[str, list] = {"dense": [], "tops": []}
    for name, harness in (("dense", dense), ("tops", tops)):
        for epoch in range(2):
            harness.epoch(epoch, lambda s, b, o, st, terms, name=name: values[name].append(
                torch.stack([terms.per_sample, terms.metrics["phi_travel"]])))
    torch.testing.assert_close(torch.cat(values["dense"], 1), torch.cat(values["tops"], 1), rtol=0, atol=1e-6)
    found = spread(tops.table("phi_ids"), tops.table("phi_values"), CLASSES)
    np.testing.assert_allclose(found, dense.table("phi"), atol=1e-6)
    for harness in (dense, tops):
        harness.state.close()


def test_factorized_equals_dense_adam_over_all_factors(source, tmp_path):
    rank, class_lr = 4, 0.02
    harness = Harness(source, tmp_path / "store", {**BODY, "estimator": "factorized", "rank": rank,
                                                   "class_lr": class_lr}, k=K)
    z = torch.from_numpy(labels_of(source))
    u = torch.nn.Parameter(torch.from_numpy(harness.table("factor")).double())
    table = harness.method.state()["table"].double()
    v, b = torch.nn.Parameter(table[:, :-1].clone()), torch.nn.Parameter(table[:, -1].clone())
    first = (u @ v.T + b).detach()
    assert first.std() == pytest.approx(0.405465 / 3**0.5, rel=0.3), "starts as spread as the dense logits"
    adam = torch.optim.Adam([{"params": [u], "lr": LR}, {"params": [v, b], "lr": class_lr}])

    def on_step(samples, batch, outputs, step, terms):
        phi = u[samples] @ v.T + b
        travel = ((phi - first[samples]).abs() * (batch.labels == -1)).sum(1) / (batch.labels == -1).sum(1)
        torch.testing.assert_close(terms.metrics["phi_travel"].double(), travel.detach(), rtol=0, atol=1e-3)
        adam.zero_grad()
        value = role_loss(phi, outputs.logits.double(), z[samples], K)
        value.backward()
        adam.step()
        assert (terms.per_sample.sum() / len(samples) + terms.coupled).item() == pytest.approx(value.item(), abs=2e-5)

    for epoch in range(3):
        harness.epoch(epoch, on_step)
    assert (replayed(harness, "factor", "factor") - u.detach()).abs().max() < 1e-3
    found = harness.method.state()["table"].double()
    assert (found - torch.cat([v, b[:, None]], 1).detach()).abs().max() < 1e-3
    assert (found - table).abs().max() > 0.1
    assert harness.state.session.metrics.chunks_read > 8, "state was never evicted"
    harness.state.close()


def test_network_equals_a_module_with_its_own_adam(source, tmp_path):
    """On feature maps: what the estimator sees is their mean, and nothing flows back into them."""
    width, hidden, class_lr = 6, 5, 0.02
    rng = torch.Generator().manual_seed(3)
    maps = torch.randn(SAMPLES, width, 2, 2, generator=rng)
    harness = Harness(source, tmp_path / "store", BODY, k=K)
    method = build_method({**BODY, "estimator": "network", "hidden": hidden, "class_lr": class_lr},
                          replace(harness.task, width=width))
    assert method.fields() == []
    net = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, CLASSES))
    names = ["hidden.weight", "hidden.bias", "labels.weight", "labels.bias"]
    net.load_state_dict(dict(zip(net.state_dict(), (method.state()[name] for name in names), strict=True)))
    net.double()
    adam, z = torch.optim.Adam(net.parameters(), lr=class_lr), torch.from_numpy(labels_of(source))
    draw = np.random.default_rng(0)
    for number in range(40):
        samples = draw.choice(SAMPLES, 16, replace=False)
        logits = logits_at(number // 10, samples)
        features = maps[samples].requires_grad_()
        terms = method.loss(Outputs(logits.requires_grad_(), None, features), batch_of(z[samples].numpy()),
                            Step(harness.world, 16, 0, 1, 0, number))
        adam.zero_grad()
        phi = net(maps[samples].mean((2, 3)).double())
        value = role_loss(phi, logits.detach().double(), z[samples], K)
        value.backward()
        adam.step()
        loss = terms.per_sample.mean() + terms.coupled
        assert loss.item() == pytest.approx(value.item(), abs=2e-5)
        loss.backward()
        assert features.grad is None
        unknown = (z[samples] == -1).double()
        torch.testing.assert_close(terms.metrics["phi_travel"].double(),
                                   ((phi.abs() * unknown).sum(1) / unknown.sum(1)).detach(), rtol=1e-3, atol=1e-5)
    for name, expected in zip(names, net.state_dict().values(), strict=True):
        torch.testing.assert_close(method.state()[name].double(), expected, rtol=1e-3, atol=1e-4)
    assert phi.abs().mean() > 0.2, "the estimates hardly moved"
    harness.state.close()


def test_phi_travel_is_the_mean_distance_of_unknown_entries_from_their_start(source, tmp_path):
    harness = Harness(source, tmp_path / "store", BODY, k=K)
    first, z = harness.table("phi"), labels_of(source)
    seen: list[float] = []

    def on_step(samples, batch, outputs, step, terms):
        current = harness.method.estimator.rows.read(step).values.numpy()
        unknown = z[samples] == -1
        expected = (np.abs(current - first[samples]) * unknown).sum(1) / unknown.sum(1)
        np.testing.assert_allclose(terms.metrics["phi_travel"].numpy(), expected, atol=1e-6)
        seen.append(float(expected.mean()))

    for epoch in range(2):
        harness.epoch(epoch, on_step)
    assert seen[0] == 0
    assert seen[-1] > 0.1
    harness.state.close()


def test_what_an_estimator_cannot_do_is_said(source, tmp_path):
    for top_k in (CLASSES + 1, 500):
        with pytest.raises(UserError, match=rf"method\.top_k = {top_k}: .* 1 to {CLASSES} of the"):
            Harness(source, tmp_path / "store", {**BODY, "estimator": "topk", "top_k": top_k}, k=K)
    task = Harness(source, tmp_path / "other", BODY, k=K).task
    method = build_method({**BODY, "estimator": "topk", "top_k": 1}, task)
    labels = np.full((3, CLASSES), -1, np.int8)
    labels[1, [2, 5]] = POSITIVE
    with pytest.raises(UserError, match=r"row 1 of shard 7 has 2 annotated positives.*Set method\.top_k to 2"):
        method.initial_rows("phi_ids", labels, 7)
    with pytest.raises(UserError, match="estimator = 'matrix'"):
        build_method({**BODY, "estimator": "matrix"}, Harness(source, tmp_path / "third", BODY, k=K).task)
