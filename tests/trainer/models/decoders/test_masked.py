"""Proves that Scob's head is two masked transformers over two maps, by naive loops, and that its copy follows them."""

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
from lacuna.trainer.models.activation import grad_cam
from lacuna.trainer.models.classifier import build_model
from lacuna.trainer.models.decoders.masked import MaskedTransformer, seen_cells
from lacuna.trainer.scores import SIGMOID
from tests.helpers.naive_layers import linear, norm

DATA = DataConfig(train={"url": "x"}, image_size=32)
DECODER = {"width": 8, "heads": 2, "feedforward": 12, "earlier": "4", "dropout": 0.0}


def head_of() -> MaskedTransformer:
    torch.manual_seed(0)
    head = MaskedTransformer(DecoderConfig(**DECODER), (6, 5), 3).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


def naive_branch(branch, x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """One image, head by head and cell by cell; `seen` [G, G] are the cells to attend to."""
    side, width = x.shape[-1], 8
    cells = linear(branch.project, x.reshape(len(x), -1).T)
    for y in range(side):
        for column in range(side):
            cells[y * side + column, : width // 2] += branch.columns[column].detach().double().numpy()
            cells[y * side + column, width // 2 :] += branch.rows[y].detach().double().numpy()
    for layer in branch.layers:
        matrices = layer.attention.in_proj_weight.detach().double().numpy().reshape(3, width, width)
        shifts = layer.attention.in_proj_bias.detach().double().numpy().reshape(3, width)
        q, k, v = (cells @ m.T + b for m, b in zip(matrices, shifts, strict=True))
        found = np.zeros_like(cells)
        for part in (slice(0, 4), slice(4, 8)):
            for n in range(len(cells)):
                near = np.array([math.exp(q[n, part] @ k[m, part] / 2) if seen.flat[m] else 0 for m in range(len(k))])
                found[n, part] = near / near.sum() @ v[:, part]
        cells = norm(layer.attention_norm, cells + linear(layer.attention.out_proj, found))
        inner = linear(layer.widen, cells)
        cells = norm(layer.norm, cells + linear(layer.narrow, np.where(inner > 0, inner, 0.01 * inner)))
    return norm(branch.norm, cells).mean(0)


def test_vectors_in_naive_loops():
    head = head_of()
    maps = torch.randn(3, 6, 3, 3), torch.randn(3, 5, 6, 6)
    where = torch.rand(3, 3, 3)
    where[2] = 0  # nothing is seen
    plain, _, vectors = head.look(maps)
    through = head.look(maps, activation=where)[2]
    for n in range(3):
        every = [naive_branch(branch, x[n].double().numpy(), np.ones(x.shape[2:], bool))
                 for branch, x in zip(head.branches, maps, strict=True)]
        np.testing.assert_allclose(vectors[n].detach(), np.concatenate(every), atol=1e-5)
        wanted = np.concatenate(every) @ head.weight.detach().numpy().T + head.bias.detach().numpy()
        np.testing.assert_allclose(plain[n].detach(), wanted, atol=1e-5)
        masks = [seen_cells(where, side)[n].numpy() for side in (3, 6)]
        if n == 2:
            assert not through[n].any()
            continue
        assert all(0 < mask.sum() < mask.size for mask in masks)
        seen = [naive_branch(branch, x[n].double().numpy(), mask)
                for branch, x, mask in zip(head.branches, maps, masks, strict=True)]
        np.testing.assert_allclose(through[n].detach(), np.concatenate(seen), atol=1e-5)


def test_masks_in_naive_loops():
    """Bilinear enlargement by 32 with half-pixel centres, means of cells, without corners; both times 0 to 1."""
    where = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(4))

    def scaled(x):
        return (x - x.min()) / (1e-7 + (x - x.min()).max())

    for n in range(2):
        small, large = scaled(where[n].double().numpy()), np.zeros((96, 96))
        for y, x in np.ndindex(96, 96):
            at = [min(max((i + 0.5) / 32 - 0.5, 0), 2) for i in (y, x)]
            low = [min(int(a), 1) for a in at]
            up, left = at[0] - low[0], at[1] - low[1]
            for dy, dx in np.ndindex(2, 2):
                share = (up if dy else 1 - up) * (left if dx else 1 - left)
                large[y, x] += share * small[low[0] + dy, low[1] + dx]
        large = scaled(large)
        for side in (3, 6):
            size, found = 96 // side, seen_cells(where, side)[n]
            for y, x in np.ndindex(side, side):
                corner = y in (0, side - 1) and x in (0, side - 1)
                mean = large[y * size : (y + 1) * size, x * size : (x + 1) * size].mean()
                assert bool(found[y, x]) == (mean >= 0.5 and not corner), (side, y, x)


def test_grad_cam_in_naive_loops():
    torch.manual_seed(3)
    features = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, dtype=torch.float64)
    scores = torch.sigmoid((features.relu() * weight).sum((1, 2, 3)))
    found = grad_cam(features, scores)
    for n in range(2):
        expected, p = np.zeros((3, 3)), scores[n].item()
        for d in range(4):
            share = 0.0
            for y, x in np.ndindex(3, 3):
                g = p * (1 - p) * weight[d, y, x].item() if features[n, d, y, x] > 0 else 0.0
                total = features[n, d].sum().item()
                share += max(g, 0) * g**2 / (2 * g**2 + g**3 * total + 1e-6) if g else 0.0
            expected += share * features[n, d].detach().numpy()
        np.testing.assert_allclose(found[n], np.maximum(expected, 0), atol=1e-5)


def test_the_copy_follows():
    head, maps = head_of(), (torch.randn(2, 6, 3, 3), torch.randn(2, 5, 6, 6))
    before = [p.clone() for p in head.slow.parameters()]
    vectors = head.look(maps, activation=torch.rand(2, 3, 3), momentum=0.75)[2]
    assert not any(p.requires_grad for p in head.slow.parameters())
    for slow, fast, old in zip(head.slow.parameters(), head.branches.parameters(), before, strict=True):
        torch.testing.assert_close(slow, 0.75 * old + 0.25 * fast)
    now = [p.clone() for p in head.slow.parameters()]
    assert head.look(maps, of=torch.tensor([0, 2]), momentum=1.0)[2].shape == vectors.shape
    assert all(torch.equal(a, b) for a, b in zip(now, head.slow.parameters(), strict=True))


def test_two_maps_of_a_backbone(tmp_path):
    config = ModelConfig(backbone="lacuna:tiny", head="masked_transformer", decoder=DECODER)
    model = build_model(config, DATA, 3, 0).eval()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    last, earlier = model.two_maps(pixels)
    torch.testing.assert_close(last, model.features(pixels))
    assert earlier.shape[-1] == 2 * last.shape[-1]
    assert (model.has_maps, model.class_width, model.vector_width) == (False, 0, 16)
    classes = torch.tensor([2, 0])
    found = model(pixels, of=classes)[1]
    leaf = last.detach().requires_grad_()
    scores = torch.sigmoid(model.head.look((leaf, earlier))[0])[[0, 1], classes]
    torch.testing.assert_close(found, grad_cam(leaf, scores))
    assert found.max() > 0
    architecture = {"model": {"backbone": "lacuna:tiny", "head": "masked_transformer", "decoder": DECODER},
                    "image_size": 32, "normalize": "unit", "feature_width": 0}
    save_file(empty_model(architecture, 3).state_dict(), tmp_path / "model.safetensors")
    exported = Exported(str(tmp_path), ["a", "b", "c"], [], SIGMOID, None, None, {}, architecture,
                        file_digest(str(tmp_path / "model.safetensors")), {})
    exported.save()
    assert export_onnx(Exported.load(str(tmp_path))) in (None, pytest.approx(0, abs=1e-5))


@pytest.mark.parametrize(("earlier", "words"), [("", "set model.decoder.earlier to the part"),
                                                ("0", "no layer of the backbone that others come before")])
def test_what_is_refused(earlier, words):
    config = ModelConfig(backbone="lacuna:tiny", head="masked_transformer", decoder={**DECODER, "earlier": earlier})
    with pytest.raises(UserError, match=words):
        build_model(config, DATA, 3, 0)
