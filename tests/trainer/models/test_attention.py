"""Proves that model.head: csra pools score maps as its authors' block does, cell by cell, and needs maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.models.attention import Attention
from lacuna.trainer.models.classifier import Classifier, build_model


def model_of(**settings) -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Identity(), 5, 4, ModelConfig(head="csra", **settings), "unit").eval()


@pytest.mark.parametrize("temperature", [1.0, 3.0, 99.0])
def test_naive_loops(temperature):
    model = model_of(csra_weight=0.3, csra_temperature=temperature)
    features = torch.randn(2, 5, 3, 3)
    logits, maps, _ = model(features, with_maps=True)
    weight, bias = model.head.weight.detach().double().numpy(), model.head.bias.detach().double().numpy()
    for n in range(2):
        for c in range(4):
            cells = [features[n, :, y, x].double().numpy() @ weight[c] / np.linalg.norm(weight[c])
                     for y in range(3) for x in range(3)]
            share = np.exp(temperature * np.array(cells))
            attended = max(cells) if temperature == 99 else sum(share * cells) / share.sum()
            expected = np.mean(cells) + 0.3 * attended + bias[c]
            assert logits[n, c].item() == pytest.approx(expected, abs=1e-5)
            np.testing.assert_allclose(maps[n, c].detach().flatten(), np.array(cells) + bias[c], atol=1e-5)
    torch.testing.assert_close(model(features)[0], logits)
    logits.sum().backward()
    assert model.head.weight.grad.abs().max() > 0


def test_golden_values():
    maps = torch.tensor([[[[1.0, 2.0], [0.0, -1.0]]]])
    assert Attention(0.5, 1.0)(maps, torch.zeros(1)).item() == pytest.approx(1.246326, abs=1e-6)
    assert Attention(0.5, 99.0)(maps, torch.zeros(1)).item() == pytest.approx(1.5)


def test_with_the_norm_and_a_bottleneck():
    """What is not attention stays: λ = 0 is the mean of the cells' scores."""
    model = model_of(csra_weight=0.0, head_norm="l2", bottleneck=3)
    model.head_norm.scale.fill_(2.0)
    features = torch.randn(2, 5, 3, 3)
    logits, maps, _ = model(features, with_maps=True)
    torch.testing.assert_close(logits, maps.mean((2, 3)))


@pytest.mark.parametrize(("backbone", "boost", "width", "words"), [
    ("features", 1.0, 8, r"model.head = 'csra' attends over the cells of a feature map: it needs image shards"),
    ("lacuna:tiny", 5.0, 0, r"model.boost = 5.0 is for model.head=linear; this is 'csra'")])
def test_what_it_needs(backbone, boost, width, words):
    config = ModelConfig(backbone=backbone, head="csra", boost=boost)
    with pytest.raises(UserError, match=words):
        build_model(config, DataConfig(train={"url": "x"}, image_size=32), 3, width)
    data = DataConfig(train={"url": "x"}, image_size=32)
    built = build_model(ModelConfig(backbone="lacuna:tiny", head="csra"), data, 3, 0)
    assert built(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))[0].shape == (2, 3)
