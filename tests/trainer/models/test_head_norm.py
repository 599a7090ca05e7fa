"""Proves the head's norm and start: the formula, maps that average to logits, decay by block in the optimizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig, PhaseConfig
from lacuna.trainer.engine import _groups
from lacuna.trainer.head_start import start_bias
from lacuna.trainer.methods.base import Task
from lacuna.trainer.models.classifier import build_model
from lacuna.trainer.models.head_norm import Sums

DATA = DataConfig(train={"url": "/nowhere"}, image_size=32)


def vectors(count: int = 50, width: int = 6) -> torch.Tensor:
    x = torch.from_numpy(np.random.default_rng(3).gamma(1.0, 1.0, (count, width)).astype(np.float32))
    x[4] = 0
    return x


def measured(model, x):
    """Statistics from two ranks' parts, added up."""
    first, second = Sums.none(model.head.in_features), Sums.none(model.head.in_features)
    first.add(model.pooled(x[:20]))
    second.add(model.pooled(x[20:]))
    first.flat += second.flat
    model.head_norm.take(first)
    return model


def test_norm_is_the_formula():
    x = vectors()
    model = measured(build_model(ModelConfig(backbone="features", head_norm="l2"), DATA, 3, 6), x)
    values = x.double().numpy()
    unit = np.array([row / np.linalg.norm(row) if row.any() else row for row in values])
    mean = unit.mean(0)
    spread = ((values - values.mean(0)) ** 2).sum(1).mean()
    c = math.sqrt(spread / ((unit - mean) ** 2).sum(1).mean())
    np.testing.assert_allclose(model.head_norm.mean.numpy(), mean, rtol=1e-5)
    assert float(model.head_norm.scale) == pytest.approx(c, rel=1e-5)
    expected = (c * (unit - mean)) @ model.head.weight.detach().double().numpy().T + model.head.bias.detach().numpy()
    np.testing.assert_allclose(model(x)[0].detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(model(torch.zeros(2, 6))[0]).all()


@pytest.mark.parametrize("settings", [{}, {"bottleneck": 5}, {"boost": 5.0}])
def test_score_maps_average_to_the_logits(settings):
    torch.manual_seed(0)
    model = build_model(ModelConfig(backbone="lacuna:tiny", head_norm="l2", **settings), DATA, 4, 0).eval()
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        sums = Sums.none(model.head.in_features)
        sums.add(model.pooled(model.features(images)))
        model.head_norm.take(sums)
        logits, maps, _ = model(images, with_maps=True)
        assert torch.allclose(maps.mean((2, 3)), logits, atol=1e-4)
        assert torch.equal(model(images)[0], logits)
        if "boost" not in settings:
            pooled = model.pooled(model.features(images))
            assert torch.allclose(logits, model.classify(pooled, model.head_norm.factor(pooled)))


def test_weights_with_and_without_the_norm_are_told_apart():
    plain, normed = (build_model(ModelConfig(backbone="features", head_norm=kind), DATA, 3, 6)
                     for kind in ("none", "l2"))
    with pytest.raises(UserError, match=r"model\.head_norm = l2.*Set model\.head_norm=none"):
        normed.load_state_dict(plain.state_dict())
    with pytest.raises(UserError, match=r"model\.head_norm = none.*Set model\.head_norm=l2"):
        plain.load_state_dict(normed.state_dict())


def task(k: float | None, positives: int = 10) -> Task:
    return Task(20, 100, np.full(20, positives), np.zeros(20, np.int64), False, expected_positives=k)


def test_bias_starts_at_the_prior(caplog):
    def bias(kind, given) -> torch.Tensor:
        torch.manual_seed(7)
        model = build_model(ModelConfig(backbone="features"), DATA, 20, 6)
        start_bias(model, ModelConfig(backbone="features", head_bias=kind), given, True)
        return model.head.bias.detach()

    logit = lambda p: math.log(p / (1 - p))  # noqa: E731
    assert torch.allclose(bias("prior", task(3.0)), torch.full((20,), logit(3 / 20)))
    with caplog.at_level("INFO", "lacuna"):
        # 2 annotated positives per image are all that is known.
        assert torch.allclose(bias("prior", task(None)), torch.full((20,), logit(2 / 20)))
    uneven = np.r_[np.zeros(10, int), np.full(10, 30)]  # a class starts at its share of the annotated positives
    found = torch.sigmoid(bias("prior", Task(20, 100, uneven, np.zeros(20, int), False, expected_positives=4.0)))
    assert torch.allclose(found, torch.tensor([4 * (n + 1) / 320 for n in uneven], dtype=torch.float32))
    assert torch.equal(bias("zero", task(None, 0)), torch.zeros(20))
    assert bias("default", task(3.0)).std() > 0
    with pytest.raises(UserError, match=r"model\.head_bias = 'prior'.*model\.expected_positives"):
        bias("prior", task(None, 0))


def test_head_decay_and_layer_decay_reach_the_optimizer():
    model = build_model(ModelConfig(backbone="torchvision:resnet18", bottleneck=4), DATA, 3, 0)
    phase = PhaseConfig(name="a", epochs=1, batch=8, lr=0.1, weight_decay=0.01, head_weight_decay=0.5, layer_decay=0.5,
                        head_lr_multiplier=10)
    groups = _groups(model, phase)
    held = {id(p): group for group in groups for p in group["params"]}
    assert len(held) == sum(1 for _ in model.parameters())
    names = {model.names.get(n.removeprefix("backbone."), n): p for n, p in model.named_parameters()}
    last, first = held[id(names["layer4.1.conv2.weight"])], held[id(names["layer4.0.conv1.weight"])]
    assert (last["lr"], last["weight_decay"]) == (0.1, 0.01)
    assert first["lr"] == pytest.approx(0.05)
    assert held[id(names["conv1.weight"])]["lr"] < held[id(names["layer1.0.conv1.weight"])]["lr"]
    assert held[id(model.head.weight)]["weight_decay"] == held[id(model.neck.weight)]["weight_decay"] == 0.5
    assert (held[id(model.head.bias)]["lr"], held[id(model.head.bias)]["weight_decay"]) == (1.0, 0.0)
    plain = _groups(model, PhaseConfig(name="a", epochs=1, batch=8, lr=0.1))
    assert len(plain) == 1  # the same learning rate and no decay for all
