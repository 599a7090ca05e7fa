"""Proves that MIME with its variational head is the published loss: bottleneck, draws and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lacuna.state_store.row_hash import random_bits, row_keys, tag_key
from lacuna.trainer.config.sections import DecoderConfig
from lacuna.trainer.methods import METHODS, build_method
from lacuna.trainer.methods.base import Outputs
from lacuna.trainer.methods.mime import MimeSettings
from lacuna.trainer.models.decoders.variational import Variational
from tests.helpers.loss_checks import random_case
from tests.helpers.method_steps import Rows, task_for, total
from tests.helpers.oracles import batch_of, step_of


def mime(z, **settings):
    return METHODS["mime"](MimeSettings(name="mime", **settings), task_for(z, draws=True, seed=5))


def loss(method, logits, features, z, **where):
    step = replace(step_of(len(z), where.pop("epoch", 0), 10), state=Rows(method, z).state, **where)
    return method.loss(Outputs(logits, None, features), batch_of(z), step)


def head_of(classes=4, latent=3) -> Variational:
    torch.manual_seed(0)
    head = Variational(DecoderConfig(width=8, heads=2, feedforward=12, latent=latent, dropout=0.0), 6, classes)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return head


def statistics(head, features):
    """μ and σ [B, L, Z], number by number; σ is an exponential that is cut off."""
    found = head.gathered(features, False)[0]
    out = head.bottleneck[2](head.bottleneck[0](found).clamp(min=0))
    latent = out.shape[2] // 2
    spread = torch.exp(torch.minimum(torch.maximum(out[..., latent:] / 2, torch.tensor(-6.0)), torch.tensor(6.0)))
    return out[..., :latent], spread


def test_the_head_in_naive_loops():
    head, features = head_of(), torch.randn(2, 6, 3, 3)
    with torch.no_grad():
        head.bottleneck[2].bias[3] = 40  # a spread at its bound
    logits, maps, found = head(features, True)
    mean, spread = statistics(head, features)
    for n, c in np.ndindex(2, 4):
        w = head.weight[c]
        assert logits[n, c].item() == pytest.approx((w @ mean[n, c] + head.bias[c]).item(), abs=1e-5)
        moved, information = 0.0, 0.0
        for m, s, weight in zip(mean[n, c].tolist(), spread[n, c].tolist(), w.tolist(), strict=True):
            moved += (weight * s) ** 2
            information += -0.5 * (1 + 2 * math.log(s) - m**2 - s**2) / 3
        assert found[n, c].tolist() == pytest.approx([math.sqrt(moved), information], rel=1e-4)
    assert maps.shape == (2, 4, 3, 3)
    (logits.sum() + found.sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())


def test_loss_by_formula():
    a, z = random_case(3, (5, 7))
    rng = np.random.default_rng(1)
    parts = rng.uniform(0.1, 2, (5, 7, 2))
    method = mime(z, information=0.3, draws=4)
    keys = row_keys(tag_key(5, "mime 2", 6), np.zeros(5, np.int64), np.arange(5))
    uniform = ((random_bits(keys, 7) >> 9) + 0.5) / 2**23
    noise = torch.special.ndtri(torch.from_numpy(uniform)).numpy()
    expected = 0.0
    for n, c in np.ndindex(5, 7):
        p = 1 / (1 + math.exp(-(a[n, c] + noise[n, c] * parts[n, c, 0] / 2)))
        expected += (-math.log((p if z[n, c] == 1 else 1 - p) + 1e-5) + 0.3 * parts[n, c, 1]) / 35
    terms = loss(method, torch.tensor(a), torch.tensor(parts), z, epoch=6, phase=2)
    assert total(terms).item() == pytest.approx(expected, rel=1e-6)


def test_draws_belong_to_sample_class_phase_and_epoch():
    z = np.zeros((400, 50), np.int8)
    method, like = mime(z), torch.zeros(1)
    first = method._noise(batch_of(z), step_of(400), like)
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 1) < 0.02
    part = batch_of(z[:100], rows=np.arange(100, 200))
    assert torch.equal(method._noise(part, step_of(400), like), first[100:200]), "whoever has the sample draws the same"
    for other in (step_of(400, 1, 10), replace(step_of(400), phase=1)):
        assert abs(np.corrcoef(first.flatten(), method._noise(batch_of(z), other, like).flatten())[0, 1]) < 0.03


def test_a_drawn_logit_is_that_of_ten_drawn_z():
    """Ten draws of z, their mean, its logit, as in the released code: the same distribution of logits and the same mean
    gradient by the head's weights."""
    head, features = head_of(classes=1), torch.randn(1, 6, 2, 2)
    times, generator = 40_000, torch.Generator().manual_seed(2)
    logits, _, found = head(features, False)
    drawn = logits + found[..., 0] * torch.randn(times, 1, generator=generator) / math.sqrt(10)
    ours = torch.autograd.grad(-torch.nn.functional.logsigmoid(drawn).mean(), head.weight)[0]
    mean, spread = statistics(head, features)
    ten = torch.randn(10, times, *mean.shape[1:], generator=generator)
    z = (mean + spread * ten).mean(0)
    naive = (head.weight * z).sum(2) + head.bias
    theirs = torch.autograd.grad(-torch.nn.functional.logsigmoid(naive).mean(), head.weight)[0]
    assert drawn.mean().item() == pytest.approx(naive.mean().item(), abs=0.02 * naive.std().item())
    assert drawn.std().item() == pytest.approx(naive.std().item(), rel=0.02)
    torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.01)


def test_other_heads_draw_nothing():
    a, z = random_case(3, (5, 7))
    plain = build_method({"name": "mime"}, task_for(z))
    assert not plain.needs().class_features
    p = 1 / (1 + np.exp(-a))
    expected = -np.log(np.where(z == 1, p, 1 - p) + 1e-5).mean()
    assert total(loss(plain, torch.tensor(a), None, z)).item() == pytest.approx(expected, rel=1e-6)
