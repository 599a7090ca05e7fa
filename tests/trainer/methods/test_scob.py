"""Scob's contrast equals loops by formula on top of ROLE, with gradients; its correlation is that of all estimates."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.trainer.config.sections import DecoderConfig
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import METHODS
from lacuna.trainer.methods.base import EpochStart, Outputs
from lacuna.trainer.methods.scob import estimated_correlation, mean_over, seen_cells
from lacuna.trainer.models.activation import grad_cam
from lacuna.trainer.models.decoders.masked import MaskedTransformer
from lacuna.trainer.sample_state import NoState
from lacuna.trainer.world import World
from tests.helpers.loss_checks import random_case
from tests.helpers.method_steps import GRID, WIDTH, Model, Rows, images, method_of, take_step, task_for, total
from tests.helpers.state.harness import CLASSES, Harness, make_source


def cosine(a, b):
    return (a @ b) / (a.norm() * b.norm())


def naive_features(out, n, c, cells=None):
    """Mean feature over the cells in which class c is seen, cell by cell; and those cells."""
    scores = out.maps[n, c].detach()
    low, high = float(scores.min()), float(scores.max())
    cells = cells or [(y, x) for y, x in np.ndindex(GRID, GRID) if scores[y, x] >= low + 0.6 * (high - low)]
    return sum(out.features[n, :, y, x] for y, x in cells) / len(cells), cells


def naive_contrast(method, weak, strong, z, bank, correlation):
    """(mean over anchored images, what the batch adds to the bank as (class, logit, feature) in order)."""
    losses, found = [], []
    for n in range(len(z)):
        positives = [i for i in range(z.shape[1]) if z[n, i] == POSITIVE]
        if not positives:
            continue
        c = max(positives, key=lambda i, n=n: weak.logits[n, i].item())
        own, cells = naive_features(weak, n, c)
        query = method.projector(naive_features(strong, n, c, cells)[0])
        first = torch.exp((1 + cosine(query, own.detach())) / 0.5)
        below = first
        for j, (_, feature) in bank.items():
            weight = 1 - correlation[c, j] ** 2
            below = below + torch.exp(weight * (1 + cosine(query, feature)) / 0.5)
        losses.append(-torch.log(first / below))
        found.append((c, weak.logits[n, c].item(), own.detach()))
    return torch.stack(losses).mean(), found


def test_contrast():
    """Four steps, between which the classifier changes: images are held against the surest of the steps before."""
    z, model = random_case(31, (6, 5))[1], Model(5)
    settings = {"contrast": 0.7, "temperature": 0.5, "keep": 0.6}
    method, role = method_of("scob", z, **settings), method_of("role", z)
    method.projector.double()
    correlation = method.correlation = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)).fill_diagonal_(1)
    bank: dict = {}
    for step in range(4):
        oracle_rows = Rows(role, z)
        weak, strong = model(images(len(z), 7)), model(images(len(z), 8))
        value, found = naive_contrast(method, weak, strong, z, bank, correlation.double())
        oracle = total(take_step(role, weak, z, oracle_rows)) + 0.7 * value
        terms = take_step(method, model(images(len(z), 7)), z, Rows(method, z), forward=model)
        parameters = [*model.parameters(), *method.projector.parameters()]
        ours, naive = (torch.autograd.grad(loss, parameters) for loss in (total(terms), oracle))
        torch.testing.assert_close(total(terms), oracle, rtol=1e-6, atol=1e-8)
        for x, y in zip(ours, naive, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
        for c, logit, feature in found:
            if logit > bank.get(c, (-np.inf,))[0]:
                bank[c] = (logit, feature)
        assert set(bank) == set(np.flatnonzero((method.surest_logit > -torch.inf).numpy()))
        for c, (logit, feature) in bank.items():
            assert float(method.surest_logit[c]) == pytest.approx(logit, rel=1e-6)
            torch.testing.assert_close(method.surest[c].double(), feature, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            model.head.weight += 0.5 * torch.randn_like(model.head.weight)
        assert step < 3 or 1 < len(bank) <= 5
    fresh = method_of("scob", z, **settings)
    fresh.load_state(method.state())
    assert torch.equal(fresh.surest, method.surest)
    assert torch.equal(fresh.correlation, method.correlation)


class Masked(torch.nn.Module):
    """Two maps of an image's patches under the real head."""

    def __init__(self, classes: int):
        super().__init__()
        torch.manual_seed(1)
        config = DecoderConfig(width=8, heads=2, feedforward=12, dropout=0.0)
        self.head = MaskedTransformer(config, (WIDTH, WIDTH), classes)

    def maps(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = pixels.float() / 64 - 2
        return tuple(torch.nn.functional.adaptive_avg_pool2d(values, side) for side in (4, 8))

    def forward(self, pixels: torch.Tensor, **look) -> Outputs:
        last, earlier = self.maps(pixels)
        return Outputs(*self.head.look((last, earlier), **look))


def masked_method(z, **settings):
    kind = METHODS["scob"]
    method = kind(validated(kind.settings_type, {"name": "scob", **settings}, "scob"), task_for(z, vector_width=16))
    return method


def test_contrast_through_masks():
    """Two steps: the copy moves in each, and the second holds images against the surest of the first; classes without
    one are held against 0."""
    z, model = random_case(31, (6, 5))[1], Masked(5)
    method, role = masked_method(z, contrast=0.7, temperature=0.5, momentum=0.9), method_of("role", z)
    assert not method.needs().maps
    assert not method.needs().backbone
    oracle_head, bank = copy.deepcopy(model), torch.zeros(5, 16)
    correlation = method.correlation = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)).fill_diagonal_(1)
    best = dict.fromkeys(range(5), -math.inf)
    for _ in range(2):
        weak = oracle_head(images(6, 7))
        losses, found = [], []
        oracle_head.head._follow(0.9)
        for n in range(6):
            positives = [i for i in range(5) if z[n, i] == POSITIVE]
            if not positives:
                continue
            c = max(positives, key=lambda i, n=n: weak.logits[n, i].item())
            last, earlier = oracle_head.maps(images(6, 7)[n : n + 1])
            scores = torch.sigmoid(oracle_head.head.look((last.requires_grad_(), earlier))[0][:, c])
            where = grad_cam(last, scores)
            one = oracle_head.head.look((last, earlier), activation=where, momentum=1.0)[2][0].detach()
            if not one.any():
                continue
            other = oracle_head.head.look(oracle_head.maps(images(6, 8)[n : n + 1]), activation=where)[2][0]
            query, below = method.projector(other), 0.0
            first = torch.exp((1 + cosine(query, one)) / 0.5)
            for j in range(5):
                near = cosine(query, bank[j]) if bank[j].any() else 0.0
                below = below + torch.exp((1 - correlation[c, j] ** 2) * (1 + near) / torch.tensor(0.5))
            losses.append(-torch.log(first / (first + below)))
            found.append((c, weak.logits[n, c].item(), one))
        assert losses
        oracle = total(take_step(role, weak, z, Rows(role, z))) + 0.7 * torch.stack(losses).mean()
        ours = total(take_step(method, model(images(6, 7)), z, Rows(method, z), forward=model))
        torch.testing.assert_close(ours, oracle, rtol=1e-5, atol=1e-6)
        mine, theirs = (torch.autograd.grad(loss, [*part.head.branches.parameters(), *method.projector.parameters()])
                        for loss, part in ((ours, model), (oracle, oracle_head)))
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
        for c, logit, vector in found:
            if logit > best[c]:
                best[c], bank[c] = logit, vector
        for c in range(5):
            torch.testing.assert_close(method.surest[c], bank[c], rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for part in (model, oracle_head):
                part.head.weight += 0.3


def test_without_positives_there_is_only_role():
    z = np.full((4, 5), UNKNOWN, np.int8)
    method, role, model = method_of("scob", z), method_of("role", z), Model(5)
    method.projector.double()
    ours = take_step(method, model(images(4, 7)), z, forward=model)
    torch.testing.assert_close(total(ours), total(take_step(role, model(images(4, 7)), z)))
    total(ours).backward()
    assert all(p.grad is not None and not p.grad.any() for p in method.projector.parameters())
    assert (method.surest_logit == -torch.inf).all()


def test_before_its_phase_there_is_only_role():
    z, model = random_case(31, (6, 5))[1], Model(5)
    method, role = method_of("scob", z, contrast_phase=1), method_of("role", z)
    method.projector.double()
    ours = take_step(method, model(images(6, 7)), z, forward=model)
    torch.testing.assert_close(total(ours), total(take_step(role, model(images(6, 7)), z)))
    total(ours).backward()
    assert all(p.grad is not None and not p.grad.any() for p in method.projector.parameters())
    later = [total(take_step(method, model(images(6, 7)), z, forward=model, phase=1)) for _ in range(2)]
    assert later[1] > later[0], "the second step has a surest image of some classes"


def test_cells():
    maps = torch.tensor([[[[0.0, 1.0], [0.4, 0.6]]], [[[3.0, 3.0], [3.0, 3.0]]]])
    cells = seen_cells(maps, torch.zeros(2, dtype=torch.int64), 0.5)
    assert cells.tolist() == [[[False, True], [False, True]], [[True, True], [True, True]]]
    features = torch.arange(2 * WIDTH * 4.0).reshape(2, WIDTH, 2, 2)
    expected = torch.stack([features[0, :, :, 1].mean(1), features[1].flatten(1).mean(1)])
    torch.testing.assert_close(mean_over(features, cells), expected)


def test_correlation_over_all_samples(tmp_path):
    """Rows of a subset only; from a real store whose shards do not fit into memory together."""
    source = make_source(str(tmp_path / "shards"))
    kept = [np.arange(shard.count) % 3 != 1 for shard in source.index.shards]
    for subset in (False, True):
        if subset:
            Subset.from_masks(source.index, "most", kept, {}).save()
            source = ShardSource.load(source.index.url, "partial", "most")
        harness = Harness(source, tmp_path / f"store{subset}", {"name": "role", "lr": 0.3}, k=2.2)
        harness.epoch(0)
        estimates = 1 / (1 + np.exp(-harness.table("phi").astype(np.float64)))
        if subset:
            estimates = estimates[np.concatenate(kept)]
        found = estimated_correlation(harness.state, source.classes).numpy()
        for i, j in np.ndindex(CLASSES, CLASSES):
            expected = 1 if i == j else (estimates[:, i] * estimates[:, j]).mean() / estimates[:, i].mean()
            assert found[i, j] == pytest.approx(expected, rel=1e-5)
        harness.state.close()


def test_a_new_epoch_forgets_the_surest_and_may_leave_correlations_out():
    z = random_case(31, (6, 5))[1]
    method, model = method_of("scob", z, correlation=False), Model(5)
    method.projector.double()
    take_step(method, model(images(6, 7)), z, forward=model)
    assert (method.surest_logit > -torch.inf).any()
    method.begin_epoch(EpochStart(0, 1, 2, 1, World(torch.device("cpu")), NoState(), lambda: iter(())))
    assert (method.surest_logit == -torch.inf).all()
    assert torch.equal(method.correlation, torch.eye(5))


def test_other_estimators_are_refused():
    with pytest.raises(UserError, match="estimator = 'topk': Input should be 'dense'"):
        method_of("scob", np.zeros((2, 3), np.int8), estimator="topk")
