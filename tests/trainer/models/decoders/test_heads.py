"""Proves that query2label and ml_decoder are the published heads, what their score maps are, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lacuna.basics.errors import UserError
from lacuna.tools.export import export_onnx
from lacuna.tools.export.folder import Exported, empty_model, file_digest
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import DecoderConfig, ModelConfig
from lacuna.trainer.head_start import start_weights
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Task
from lacuna.trainer.models.classifier import build_model, set_head_bias
from lacuna.trainer.models.decoders.base import spread
from lacuna.trainer.models.decoders.ml_decoder import MLDecoder
from lacuna.trainer.models.decoders.query2label import Query2Label
from lacuna.trainer.scores import SIGMOID
from tests.helpers.naive_layers import linear, norm

DATA = DataConfig(train={"url": "x"}, image_size=32)


def model_of(head: str, classes: int = 3, **settings):
    torch.manual_seed(0)
    decoder = {"width": 16, "feedforward": 24, "heads": 2, **settings.pop("decoder", {})}
    return build_model(ModelConfig(backbone="lacuna:tiny", head=head, decoder=decoder, **settings), DATA, classes,
                       0).eval()


@pytest.mark.parametrize(("classes", "groups"), [(7, 3), (5, 100)])
def test_ml_decoder_is_that_of_timm(classes, groups):
    from timm.layers.ml_decoder import MLDecoder as Published

    torch.manual_seed(0)
    theirs = Published(classes, groups, 16, 10).eval()
    ours = MLDecoder(DecoderConfig(width=16, groups=groups), 10, classes).eval()
    layer = theirs.decoder.layers[0]
    theirs.decoder = layer  # newer versions of torch refuse the list of layers around it
    pairs = [(ours.project, theirs.embed_standart), (ours.first_norm, layer.norm1),
             (ours.decoder.attention, layer.multihead_attn), (ours.decoder.attention_norm, layer.norm2),
             (ours.decoder.widen, layer.linear1), (ours.decoder.narrow, layer.linear2),
             (ours.decoder.norm, layer.norm3)]
    for own, other in pairs:
        torch.nn.init.normal_(other.weight if hasattr(other, "weight") else other.in_proj_bias)
        own.load_state_dict(other.state_dict())
    with torch.no_grad():
        ours.queries.copy_(theirs.query_embed.weight)
        ours.weight.copy_(theirs.duplicate_pooling)
        ours.bias.copy_(theirs.duplicate_pooling_bias.normal_())
    features = torch.randn(2, 10, 3, 3)
    logits, maps, _ = ours(features, True)
    torch.testing.assert_close(logits, theirs(features))
    assert (maps is not None) == ours.of_classes == (groups >= classes)


def naive_attention(layer, asking, keys, values) -> tuple[np.ndarray, np.ndarray]:
    """Head by head, query by query: what is gathered [N, W] and the mean attention [N, M]."""
    heads, width = layer.attention.num_heads, asking.shape[1]
    matrices = layer.attention.in_proj_weight.detach().double().numpy().reshape(3, width, width)
    shifts = layer.attention.in_proj_bias.detach().double().numpy().reshape(3, width)
    q, k, v = (x @ m.T + b for x, m, b in zip((asking, keys, values), matrices, shifts, strict=True))
    size, out, mean = width // heads, np.zeros_like(q), np.zeros((len(q), len(k)))
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        for n in range(len(q)):
            near = np.exp(np.array([q[n, part] @ k[m, part] for m in range(len(k))]) / math.sqrt(size))
            near /= near.sum()
            mean[n] += near / heads
            out[n, part] = near @ v[:, part]
    return linear(layer.attention.out_proj, out), mean


def naive_layer(layer, target, asking, keys, values) -> tuple[np.ndarray, np.ndarray]:
    found, attention = naive_attention(layer, asking, keys, values)
    target = norm(layer.attention_norm, target + found)
    return norm(layer.norm, target + linear(layer.narrow, np.maximum(linear(layer.widen, target), 0))), attention


def naive_places(side: int, width: int) -> np.ndarray:
    half, found = width // 2, np.zeros((side * side, width))
    for row in range(side):
        for column in range(side):
            for place, number in ((0, row), (half, column)):
                for i in range(half):
                    turn = (number + 1) / (side + 1e-6) * 2 * math.pi / 10_000 ** (2 * (i // 2) / half)
                    found[row * side + column, place + i] = math.cos(turn) if i % 2 else math.sin(turn)
    return found


def test_query2label_in_naive_loops():
    torch.manual_seed(0)
    head = Query2Label(DecoderConfig(width=8, heads=2, feedforward=12), 6, 4).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    features = torch.randn(2, 6, 3, 3)
    logits, maps, gathered = head(features, True)
    places, queries = naive_places(3, 8), head.queries.detach().double().numpy()
    for n in range(2):
        cells = linear(head.project, features[n].flatten(1).T.double().numpy())
        cells, _ = naive_layer(head.encoder[0], cells, cells + places, cells + places, cells)
        found, attention = np.zeros((4, 8)), np.zeros(0)
        for layer in head.decoder:
            found, attention = naive_layer(layer, found, found + queries, cells + places, cells)
        found = norm(head.norm, found)
        np.testing.assert_allclose(gathered[n].detach(), found, atol=1e-5)
        wanted = (found * head.weight.detach().numpy()).sum(1) + head.bias.detach().numpy()
        np.testing.assert_allclose(logits[n].detach(), wanted, atol=1e-5)
        share = attention / attention.max(1, keepdims=True)
        np.testing.assert_allclose(torch.sigmoid(maps[n]).flatten(1).detach(), share / (1 + np.exp(-wanted))[:, None],
                                   atol=1e-5)


def test_maps_of_sure_classes_stay_finite():
    logits = torch.tensor([[-60.0, 0.0, 60.0]], requires_grad=True)
    attention = torch.tensor([[[0.7, 0.3, 0.0]]]).expand(1, 3, 3).clone().requires_grad_()
    maps = spread(logits, attention)
    torch.testing.assert_close(maps[0, :2, 0].sigmoid(), logits[0, :2].sigmoid(), atol=1e-5, rtol=0)
    maps.sum().backward()
    assert all(torch.isfinite(x).all() for x in (maps, logits.grad, attention.grad))


@pytest.mark.parametrize("head", ["query2label", "ml_decoder", "variational"])
def test_bias_queries_and_learning(head, tmp_path):
    model = model_of(head, 5)
    frequencies = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    set_head_bias(model, "prior", frequencies)
    torch.testing.assert_close(torch.sigmoid(model.head.bias), frequencies)
    vectors = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    np.save(tmp_path / "classes.npy", vectors)
    ones = np.ones(5, np.int64)
    config = ModelConfig(head=head, head_init=str(tmp_path / "classes.npy"))
    start_weights(model, config, Task(5, 9, ones, ones, False, class_names=tuple("abcde")))
    queries = model.head.queries.detach().numpy()
    np.testing.assert_allclose(queries / np.linalg.norm(queries), vectors / np.linalg.norm(vectors), rtol=1e-5)
    model.train()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    logits, maps, features = model(pixels, with_maps=True, of_classes=True)
    assert (logits.shape, maps.shape, features.shape) == ((2, 5), (2, 5, 8, 8), (2, 5, 2 if model.draws else 16))
    assert model(pixels)[2].shape == (2, 128, 8, 8)
    (logits.sum() + maps.sum() + features.sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_query_for_several_classes_has_no_maps(tmp_path):
    model = model_of("ml_decoder", 5, decoder={"groups": 2})
    assert (model.has_maps, model.class_width) == (False, 0)
    ones = np.ones(5, np.int64)
    task = Task(5, 9, ones, ones, False, grid=8, width=128, class_names=tuple("abcde"), expected_positives=2.0,
                has_maps=False)
    with pytest.raises(UserError, match=r"'en_scl' needs a score map for every class.* model.decoder.groups=5"):
        build_method({"name": "en_scl"}, task)
    np.save(tmp_path / "classes.npy", np.ones((5, 16), np.float32))
    config = ModelConfig(head="ml_decoder", head_init=str(tmp_path / "classes.npy"))
    with pytest.raises(UserError, match=r"has 2 for 5 classes. Set model.decoder.groups=5"):
        start_weights(model, config, task)


@pytest.mark.parametrize(("settings", "words"), [
    ({"boost": 5.0}, r"model.boost = 5.0 is for model.head=linear or csra; this is 'query2label'"),
    ({"head_norm": "l2"}, r"model.head_norm = 'l2' is for .* Set model.head_norm=none"),
    ({"bottleneck": 8}, r"model.bottleneck = 8 is for .* model.decoder.width for a projection"),
    ({"decoder": {"heads": 3}}, r"model.decoder.heads = 3 does not divide the width 16"),
    ({"decoder": {"width": 18}}, r"its width, here 18, must be divisible by 4"),
    ({"backbone": "features"}, r"model.head = 'query2label' attends over the cells of a feature map"),
])
def test_what_is_refused(settings, words):
    decoder = {"width": 16, "heads": 2, **settings.pop("decoder", {})}
    config = ModelConfig(**{"backbone": "lacuna:tiny", "head": "query2label", "decoder": decoder, **settings})
    with pytest.raises(UserError, match=words):
        build_model(config, DATA, 3, 8 if config.backbone == "features" else 0)


@pytest.mark.parametrize(("head", "groups"), [("query2label", 0), ("ml_decoder", 0), ("ml_decoder", 2),
                                              ("variational", 0)])
def test_onnx(head, groups, tmp_path):
    decoder = {"width": 16, "feedforward": 24, "heads": 2, "groups": groups}
    architecture = {"model": {"backbone": "lacuna:tiny", "head": head, "decoder": decoder}, "image_size": 32,
                    "normalize": "unit", "feature_width": 0}
    save_file(empty_model(architecture, 3).state_dict(), tmp_path / "model.safetensors")
    exported = Exported(str(tmp_path), ["a", "b", "c"], [], SIGMOID, None, None, {}, architecture,
                        file_digest(str(tmp_path / "model.safetensors")), {})
    exported.save()
    assert export_onnx(Exported.load(str(tmp_path))) in (None, pytest.approx(0, abs=1e-5))
