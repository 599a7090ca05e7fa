"""IGNORE, LAC, SCPNet-style and CCD's consistency equal loops over entries by formula, with gradients by autograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs
from lacuna.trainer.methods.ignore import kept_pixels
from lacuna.trainer.methods.lac import Entries, Queue, contrastive
from tests.helpers.loss_checks import random_case
from tests.helpers.method_steps import GRID, SIDE, Model, Rows, images, method_of, take_step, task_for, total


def case(rows=6, classes=5):
    """Labels with rows without positives, all unknown, all known, and two views' outputs of a small model."""
    return random_case(31, (rows, classes))[1], Model(classes)


def nl(p):
    return -torch.log(p + 1e-5)


def assert_same(model, ours, oracle):
    ours.backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    oracle.backward()
    torch.testing.assert_close(ours, oracle, rtol=1e-6, atol=1e-9)
    for a, b in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-5, atol=1e-8)
    model.zero_grad()


@pytest.mark.parametrize(("name", "wanted"), [("ignore", "score maps"), ("lac", "score maps"), ("scob", "score maps"),
                                              ("scpnet", "two views of an image")])
def test_feature_shards_are_refused(name, wanted):
    task = replace(task_for(case()[0]), grid=0)
    with pytest.raises(UserError, match=f"method.name = '{name}' needs {wanted}, which feature shards do not have"):
        build_method({"name": name}, task)


# ---- IGNORE

def naive_mask(maps, z, side, keep):
    shown = torch.ones(len(z), side, side, dtype=torch.bool)
    for n in range(len(z)):
        found = [maps[n, i] for i in range(z.shape[1]) if z[n, i] == POSITIVE]
        if found:
            cam = torch.stack(found).max(0).values
            cam = (cam - cam.min()) / (cam.max() - cam.min())
            shown[n] = F.interpolate(cam[None, None], size=(side, side), mode="bilinear")[0, 0] > keep
    return shown


def ignore_oracle(model, z, gap_mean, logit_mean, rejecting, settings):
    """(loss, new G, new A)."""
    weak, strong = model(images(len(z), 7)), model(images(len(z), 8)).logits
    blank = torch.tensor([20, 30, 40], dtype=torch.uint8)
    hidden = images(len(z), 7).clone()
    shown = naive_mask(weak.maps.detach(), z, SIDE, settings["keep"])
    for n in range(len(z)):
        hidden[n][:, ~shown[n]] = blank[:, None]
    a, m = weak.logits, model(hidden).logits.detach()
    at = [(n, i) for n, i in np.ndindex(*z.shape) if z[n, i] == POSITIVE]
    gap = (a.detach() - m).abs()
    gap_mean = 0.999 * gap_mean + 0.001 * float(torch.stack([gap[x] for x in at]).mean())
    logit_mean = 0.999 * logit_mean + 0.001 * a.detach().mean(0)
    kept = [(n, i) for n, i in np.ndindex(*z.shape)
            if not (rejecting and z[n, i] == UNKNOWN and gap[n, i] > gap_mean and a[n, i] > logit_mean[i])]
    p, s = torch.sigmoid(a), torch.sigmoid(strong)
    own = sum(nl(p[x]) for x in at) / len(at)
    assumed = sum(nl(s[x]) if z[x] == POSITIVE else nl(1 - s[x]) for x in kept) / len(kept)
    loss = settings["positive_weight"] * own + assumed + 0.5 * ((strong - a) ** 2).mean()
    return loss, gap_mean, logit_mean, z.size - len(kept)


def test_ignore():
    z, model = case()
    settings = {"positive_weight": 0.3, "keep": 0.6}
    method = method_of("ignore", z, **settings)
    gap_mean, logit_mean, rejections = 0.0, torch.zeros(5, dtype=torch.float64), []
    for epoch in (0, 2, 3, 9):
        oracle, gap_mean, logit_mean, rejected = ignore_oracle(model, z, gap_mean, logit_mean, epoch >= 3, settings)
        terms = take_step(method, model(images(len(z), 7)), z, forward=model, epoch=epoch)
        assert_same(model, total(terms), oracle)
        rejections.append(rejected)
        assert float(method.state()["gap"]) == pytest.approx(gap_mean, rel=1e-5)
        np.testing.assert_allclose(method.state()["logits"].numpy(), logit_mean.numpy(), rtol=1e-5)
    assert rejections[:2] == [0, 0]
    assert rejections[2] > 0
    fresh = method_of("ignore", z, **settings)
    fresh.load_state(method.state())
    assert torch.equal(fresh.logits, method.logits)


def test_ignore_hides_nothing_without_a_positive_and_normalises_per_image():
    maps = torch.randn(3, 4, GRID, GRID, generator=torch.Generator().manual_seed(0))
    maps[1] *= 1000  # another image's scale is no concern of the first
    z = np.full((3, 4), UNKNOWN, np.int8)
    z[0, 1] = z[1, 2] = POSITIVE
    z[2] = NEGATIVE
    shown = kept_pixels(maps, torch.from_numpy(z) == POSITIVE, 16, 0.5)
    np.testing.assert_array_equal(shown[:, 0].numpy(), naive_mask(maps, z, 16, 0.5).numpy())
    assert shown[2].all()
    assert 0 < shown[0].float().mean() < 1
    alone = kept_pixels(maps[:1], torch.from_numpy(z[:1]) == POSITIVE, 16, 0.5)
    assert torch.equal(alone[0], shown[0])


# ---- LAC

def plc_oracle(model, z, tau):
    a, s = model(images(len(z), 7)).logits, model(images(len(z), 8)).logits
    own, agree = 0.0, []
    for n, i in np.ndindex(*z.shape):
        own = own - F.logsigmoid(a[n, i] if z[n, i] == POSITIVE else -a[n, i])
        c = float(torch.sigmoid(a[n, i].detach())) + (z[n, i] == POSITIVE)
        c = 0.0 if z[n, i] == NEGATIVE else c
        if c >= tau or c < 1 - tau:
            agree.append(-F.logsigmoid(s[n, i] if c >= tau else -s[n, i]))
    return own / z.size + 2.0 * sum(agree) / len(agree)


def test_lac_before_the_contrast():
    z, model = case()
    method = method_of("lac", z, consistency=2.0, threshold=0.6)
    method.projector.double()
    terms = take_step(method, model(images(len(z), 7)), z, forward=model)
    assert terms.coupled.item() == 0
    assert_same(model, total(terms), plc_oracle(model, z, 0.6))
    assert (method.queue.classes == -1).all()
    total(take_step(method, model(images(len(z), 7)), z, forward=model)).backward()
    gradients = [p.grad for p in method.module().parameters()]
    assert all(g is not None and not g.any() for g in gradients), "every parameter has a gradient on every rank"


def naive_contrast(entries, temperature):
    """entries: list of (class, weak, strong); the mean over anchors of the mean over positives of −log share."""
    flat = [(c, v) for c, *views in entries for v in views]
    losses = []
    for i, (c, v) in enumerate(flat):
        others = [(d, w) for j, (d, w) in enumerate(flat) if j != i]
        below = torch.logsumexp(torch.stack([v @ w for _, w in others]) / temperature, 0)
        losses.append(-torch.stack([v @ w / temperature - below for d, w in others if d == c]).mean())
    return torch.stack(losses).mean()


def test_contrast_by_formula():
    torch.manual_seed(0)
    features = F.normalize(torch.randn(7, 2, 4, dtype=torch.float64), dim=2).requires_grad_()
    classes = torch.tensor([0, 1, 0, 2, 1, 0, 3])
    ours = contrastive(features, classes, 0.5)
    naive = naive_contrast([(int(c), *f) for c, f in zip(classes, features, strict=True)], 0.5)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(torch.autograd.grad(ours, features)[0], torch.autograd.grad(naive, features)[0])


def test_lac_contrast_over_a_queue_that_fills_up():
    """Six steps in a queue of 12: the naive side keeps a list and replays the published pointer rule."""
    z, model = case()
    method = method_of("lac", z, contrast_phase=0, contrast_threshold=0.8, queue=12, embedding=4, contrast=0.7)
    method.projector.double()
    held: list = [None] * 12
    pointer = 0
    for step in range(6):
        a = model(images(len(z), 7))
        terms = take_step(method, a, z, forward=model, phase=0, epoch=step)
        strong, new = model(images(len(z), 8)), []
        sure = torch.where(torch.from_numpy(z) == NEGATIVE, 0.0,
                           torch.sigmoid(a.logits.detach()) + (torch.from_numpy(z) == POSITIVE))
        chosen = [(n, i) for n, i in np.ndindex(*z.shape) if sure[n, i] >= 0.8]
        assert 0 < len(chosen) <= 12
        for n, i in chosen:
            views = []
            for out in (a, strong):
                weights = torch.softmax(out.maps[n, i].flatten(), 0)
                mean = sum(w * out.features[n].flatten(1)[:, g] for g, w in enumerate(weights))
                views.append(F.normalize(method.projector(mean), dim=0))
            new.append((i, *views))
        pointer = 0 if pointer + len(new) >= 12 else pointer
        held[pointer : pointer + len(new)] = new
        pointer += len(new)
        value = naive_contrast([e for e in held if e is not None], 0.5)
        torch.testing.assert_close(terms.coupled, 0.7 * value, rtol=1e-5, atol=1e-7)  # the queue is float32
        ours, naive = (torch.autograd.grad(v, [*model.parameters(), *method.projector.parameters()], retain_graph=True)
                       for v in (terms.coupled, 0.7 * value))
        for x, y in zip(ours, naive, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
        held = [None if e is None else (e[0], e[1].detach(), e[2].detach()) for e in held]
    assert int(method.state()["pointer"]) == pointer
    fresh = method_of("lac", z, contrast_phase=0, queue=12, embedding=4)
    fresh.load_state(method.state())
    assert torch.equal(fresh.queue.features, method.queue.features)


def test_lac_contrasts_what_queries_gathered():
    """With a head that has a feature of every class, those are projected; score maps are not asked for."""
    z, _ = case()
    task = replace(task_for(z), class_width=3)
    method = build_method({"name": "lac", "contrast_phase": 0, "contrast_threshold": 0.8, "embedding": 4}, task)
    assert (method.needs().maps, method.needs().class_features) == (False, True)
    method.projector.double()
    torch.manual_seed(0)
    weak, strong = (Outputs(torch.randn(*z.shape, dtype=torch.float64), None,
                            torch.randn(*z.shape, 3, dtype=torch.float64)) for _ in range(2))
    terms = take_step(method, weak, z, forward=lambda view: strong, phase=0)
    sure = torch.where(torch.from_numpy(z) == NEGATIVE, 0.0,
                       torch.sigmoid(weak.logits) + (torch.from_numpy(z) == POSITIVE))
    entries = [(i, *(F.normalize(method.projector(out.features[n, i]), dim=0) for out in (weak, strong)))
               for n, i in np.ndindex(*z.shape) if sure[n, i] >= 0.8]
    assert len(entries) > 1
    torch.testing.assert_close(terms.coupled, naive_contrast(entries, 0.5), rtol=1e-5, atol=1e-7)


def test_lac_takes_the_surest_entries_when_a_batch_has_more_than_the_queue():
    z = np.full((6, 5), UNKNOWN, np.int8)
    z[0, 2] = z[4, 1] = POSITIVE
    method, model = method_of("lac", z, contrast_phase=0, contrast_threshold=0.5, queue=4), Model(5, torch.float32)
    with torch.no_grad():
        model.head.bias += 3
    take_step(method, (out := model(images(6, 7))), z, forward=model, phase=0)
    sure = torch.sigmoid(out.logits) + (torch.from_numpy(z) == POSITIVE)
    assert (sure >= 0.5).sum() > 4
    expected = sorted((i % 5) for i in sure.flatten().topk(4).indices.tolist())
    assert sorted(method.queue.classes.tolist()) == expected
    assert int(method.queue.pointer) == 4


def test_nothing_to_contrast():
    """No entry in a step, none in the queue: the loss is 0 and every gradient finite; a held queue stays as it is."""
    features = torch.randn(3, 2, 4, requires_grad=True)
    nothing = Entries(features, torch.zeros(3, dtype=torch.int64), torch.tensor(0))
    empty, value = Queue.empty(5, 4).contrast(nothing, 0.5)
    value.backward()
    assert value.item() == 0
    assert not features.grad.any()
    assert (empty.classes == -1).all()
    held, _ = empty.contrast(Entries(features, torch.tensor([2, 2, 1]), torch.tensor(2)), 0.5)
    after, value = held.contrast(nothing, 0.5)
    assert after.classes.tolist() == held.classes.tolist() == [2, 2, -1, -1, -1]
    assert torch.equal(after.features, held.features)
    assert value.isfinite()


# ---- SCPNet-style

@pytest.mark.parametrize("related", [False, True])
def test_scpnet(tmp_path, related):
    """Thresholds follow the hard targets of all samples, counted by looking at every row."""
    z, model = case()
    relation = np.random.default_rng(0).dirichlet(np.ones(5), 5)
    settings = {"hard_k": 2, "consistency": 0.5, "base_threshold": 0.9}
    if related:
        np.save(tmp_path / "relation.npy", relation)
        settings.update(relation=str(tmp_path / "relation.npy"), relation_weight=3.0)
    method, splc = method_of("scpnet", z, **settings), method_of("splc", z)
    rows = Rows(method, z)
    selected, left_out = np.zeros(z.shape, bool), 0
    with torch.no_grad():
        model.head.weight *= 3
    for epoch in range(4):
        a, s = model(images(len(z), 7)).logits, model(images(len(z), 8)).logits
        p, count = torch.sigmoid(a.detach()).numpy(), selected.sum(0)
        rate = np.maximum(count / max(count.max(), 2 * len(z) - count.sum()), 1 / 5)
        differs = 0.0
        for n in range(len(z)):
            top = np.argsort(-p[n])[:2]
            passed = [i for i in top if p[n, i] >= 0.9 * rate[i] / (2 - rate[i]) and z[n, i] != NEGATIVE]
            hard = [i in passed or z[n, i] == POSITIVE for i in range(5)]
            if any(hard):
                selected[n] = hard
            left_out += not passed
            if passed:
                differs = differs + sum(-F.logsigmoid(s[n, i] if hard[i] else -s[n, i]) for i in range(5))
            for i in range(5 if related and passed else 0):
                target = sum(relation[i, j] * p[n, j] for j in range(5))
                differs = differs - 3 * (target * F.logsigmoid(s[n, i]) + (1 - target) * F.logsigmoid(-s[n, i]))
        first = total(take_step(splc, model(images(len(z), 7)), z, epoch=epoch))
        terms = take_step(method, model(images(len(z), 7)), z, rows, forward=model, epoch=epoch)
        assert_same(model, total(terms), first + 0.5 * differs)
        np.testing.assert_array_equal(rows.state.read("selected").numpy(), selected)
        np.testing.assert_array_equal(method.state()["counts"].numpy(), selected.sum(0))
        with torch.no_grad():
            model.head.weight += 0.4 * torch.randn_like(model.head.weight)
    assert 0 < selected.sum() < selected.size
    assert left_out


@pytest.mark.parametrize(("matrix", "message"), [
    (np.full((5, 4), 0.25), r"of shape \[5, 4\], the data needs \[5, 5\]"),
    (np.ones((5, 5)), "sum to 1"), (np.eye(5) * 2 - 0.2, "sum to 1"), (b"not numbers", "no .npy file of numbers"),
    (b"PK\x03\x04 torn", "no .npy file of numbers"), (np.full((5, 5), "a"), "no .npy file of numbers"),
    (None, "cannot be read")])
def test_wrong_relations_are_named(tmp_path, matrix, message):
    path = tmp_path / "relation.npy"
    if isinstance(matrix, bytes):
        path.write_bytes(matrix)
    elif matrix is not None:
        np.save(path, matrix)
    with pytest.raises(UserError, match=f"method.relation = .*relation.npy.*{message}"):
        method_of("scpnet", case()[0], relation=str(path))


# ---- CCD (its targets: test_score_tables.py)

def test_ccd_consistency():
    """The strong view follows the first one's probabilities, which get no gradient from it; not before late_epoch."""
    z, model = case()
    settings = {"consistency": 0.7, "late_epoch": 2}
    plain, method = method_of("ccd", z, **{**settings, "consistency": 0}), method_of("ccd", z, **settings)
    assert (plain.needs().strong_view, method.needs().strong_view) == (False, True)
    tables = {"scores": np.random.default_rng(0).dirichlet(np.ones(5), len(z)).astype(np.float16)}
    plain.bias = method.bias = torch.full((5,), 0.4)
    for epoch in (1, 2):
        a, s = model(images(len(z), 7)).logits, model(images(len(z), 8)).logits
        p, follows = torch.sigmoid(a.detach()), 0.0
        for n, i in np.ndindex(*z.shape):
            follows = follows - (p[n, i] * F.logsigmoid(s[n, i]) + (1 - p[n, i]) * F.logsigmoid(-s[n, i])) / z.size
        first = total(take_step(plain, model(images(len(z), 7)), z, Rows(plain, z, tables), epoch=epoch))
        terms = take_step(method, model(images(len(z), 7)), z, Rows(method, z, tables), forward=model, epoch=epoch)
        assert_same(model, total(terms), first + 0.7 * follows * (epoch == 2))
