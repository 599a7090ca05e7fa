"""Backbones of every family give the features of the model they come from, from files too, and say what they cannot."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from lacuna.basics.errors import UserError
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.models.classifier import build_model
from tests.helpers.backbones import build, pictures


def shake(body: torch.nn.Module) -> None:
    """Biases and statistics that are not 0 and 1, so that a part that was left out shows."""
    for name, tensor in body.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.add_(0.1 * torch.rand_like(tensor))
        assert not tensor.isnan().any(), name


def last_linear(body: torch.nn.Module) -> torch.nn.Linear:
    return [module for module in body.modules() if isinstance(module, torch.nn.Linear)][-1]


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "swin_t", "regnet_y_400mf", "shufflenet_v2_x0_5",
                                  "mnasnet0_5", "mobilenet_v2", "efficientnet_b0"])
def test_a_torchvision_file_gives_the_whole_models_logits(name, tmp_path):
    torch.manual_seed(0)
    body = torchvision.models.get_model(name, num_classes=7).eval()
    shake(body)
    torch.save({"state_dict": {f"module.{k}": v for k, v in body.state_dict().items()}}, tmp_path / "weights.pth.tar")
    model = build(f"torchvision:{name}", weights=str(tmp_path / "weights.pth.tar"))
    model.head.load_state_dict(last_linear(body).state_dict())
    with torch.no_grad():
        expected = body(pictures() / 255)
        logits, maps, _ = model(pictures(), with_maps=True)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(maps.mean((2, 3)), expected, rtol=1e-4, atol=1e-4)
    assert maps.shape[2] == maps.shape[3]


@pytest.mark.parametrize(("name", "size", "width", "side"), [
    ("tresnet_m", 64, 2048, 2), ("vit_tiny_patch16_224", 64, 192, 4), ("swin_tiny_patch4_window7_224", 64, 768, 2),
    ("xcit_nano_12_p16_224", 64, 128, 4), ("resnet18", 64, 512, 2),
])
def test_timm_backbones_give_square_maps_at_any_size(name, size, width, side):
    model = build(f"timm:{name}", size)
    with torch.no_grad():
        logits, maps, _ = model(pictures(size), with_maps=True)
    assert model.head.in_features == width
    assert maps.shape == (2, 7, side, side)
    torch.testing.assert_close(maps.mean((2, 3)), logits, rtol=1e-4, atol=1e-4)


def test_the_class_token_is_left_out_of_the_map():
    model = build("timm:vit_tiny_patch16_224", 32)
    body = model.backbone.body
    with torch.no_grad():
        tokens = body.forward_features(pictures(32) / 255)
        assert tokens.shape[1] == 1 + 4
        features = model.features(pictures(32))
    torch.testing.assert_close(features[:, :, 1, 0], tokens[:, 3])


def test_the_weights_of_a_run_of_ours_and_of_timm_are_loaded_whole(tmp_path):
    one = build("timm:resnet18")
    save_file({k: v.contiguous() for k, v in one.state_dict().items()}, tmp_path / "model.safetensors")
    two = build("timm:resnet18", classes=3, weights=str(tmp_path / "model.safetensors"))
    torch.testing.assert_close(two.features(pictures()), one.features(pictures()), rtol=0, atol=0)

    body = timm.create_model("resnet18", num_classes=11).eval()
    torch.save(body.state_dict(), tmp_path / "body.pth")
    three = build("timm:resnet18", weights=str(tmp_path / "body.pth"))
    torch.testing.assert_close(three.features(pictures()), body.forward_features(pictures() / 255))


def test_what_cannot_be_built_is_named_with_the_remedy(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "r18.pth")
    (tmp_path / "broken.pth").write_bytes(b"not a file of tensors")
    torch.save({"weights": [1, 2]}, tmp_path / "odd.pt")
    cases = {
        ("torchvision:resnet81", "none"): "did you mean 'resnet18'?",
        ("torchvision:resnet18", "IMAGENET1K_V9"): "one of IMAGENET1K_V1",
        ("torchvision:vit_b_16", "none"): "Use its timm twin",
        ("torchvision:resnet50", str(tmp_path / "r18.pth")): "Is it the right architecture?",
        ("torchvision:resnet18", str(tmp_path / "none.pth")): "no such file",
        ("torchvision:resnet18", str(tmp_path / "broken.pth")): "not a file of plain tensors",
        ("torchvision:resnet18", str(tmp_path / "odd.pt")): "expected named tensors",
        ("timm:resnet81", "none"): "did you mean 'resnet",
        ("timm:resnet18", "IMAGENET1K_V1"): "a pretrained tag belongs to the name",
        ("torchvision:alexnet", "none"): "cannot take data.image_size = 32",
        ("lacuna:tiny", "default"): "write 'none' or a file",
        ("resnet50", "none"): "write 'torchvision:NAME'",
        ("features", "none"): "data.train holds images",
    }
    for (backbone, weights), message in cases.items():
        with pytest.raises(UserError) as caught:
            build(backbone, 32, weights=weights)
        assert message in str(caught.value), backbone


def test_boost_multiplies_positive_cells_before_the_mean():
    """BoostLU by formula, with gradients; maps and logits come from the same boosted scores, also in evaluation."""
    torch.manual_seed(3)
    data = DataConfig(train={"url": "x"}, image_size=32)
    plain = build_model(ModelConfig(backbone="lacuna:tiny"), data, 5, 0)
    boosted = build_model(ModelConfig(backbone="lacuna:tiny", boost=5.0), data, 5, 0)
    boosted.load_state_dict(plain.state_dict())
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    cam = plain(images, with_maps=True)[1]
    expected = torch.stack([torch.stack([sum(5 * v if v > 0 else v for v in m.flatten()) / m.numel() for m in image])
                            for image in cam])
    for model in (boosted, boosted.eval()):
        logits, maps, _ = model(images, with_maps=True)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(maps.mean((2, 3)), logits)
        torch.testing.assert_close(model(images)[0], logits)
        assert model(images)[1] is None
    ours, theirs = (torch.autograd.grad(value.sum(), model.head.weight)[0]
                    for value, model in ((boosted(images)[0], boosted), (expected, plain)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (expected - plain(images)[0]).abs().max() > 0.1


def test_boost_needs_score_maps():
    with pytest.raises(UserError, match=r"model\.boost = 5\.0.*feature vectors"):
        build_model(ModelConfig(backbone="features", boost=5.0), DataConfig(train={"url": "x"}), 5, 64)
