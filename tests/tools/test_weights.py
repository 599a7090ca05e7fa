"""Proves that `lacuna weights` finds files, recognises architectures, and brings foreign layouts into a backbone."""

from __future__ import annotations

import json

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from lacuna.tools.cli import main
from lacuna.trainer.models.backbones import SOURCES
from lacuna.trainer.models.weights import load_weights


def features(backbone: str, path: str) -> torch.Tensor:
    """Of noise, by a backbone that was filled from a file as training does it."""
    source, _, name = backbone.partition(":")
    body, part = SOURCES[source](name, "none", 64)
    load_weights(body, part, path)
    with torch.no_grad():
        return part.eval()(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))


def lively(model: torch.nn.Module) -> torch.nn.Module:
    """Every tensor different, statistics too."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.01)
    return model


def renamed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The layout of another implementation: the same tensors in the same order, under names that say nothing."""
    return {f"_part.{i}.{name.rpartition('.')[2]}": t for i, (name, t) in enumerate(model.state_dict().items())}


def test_another_implementation_of_the_same_network(tmp_path, capsys):
    model = lively(timm.create_model("tf_efficientnet_lite0"))
    path, out = str(tmp_path / "lite0.pth"), str(tmp_path / "lite0.safetensors")
    torch.save(renamed(model), path)
    assert main(["weights", path, "--backbone", "timm:tf_efficientnet_lite0", "--size", "64", "--out", out]) == 0
    assert f"model.weights={out}" in capsys.readouterr().out
    with torch.no_grad():
        expected = model.eval().forward_features(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
    for file in (path, out):
        assert torch.equal(features("timm:tf_efficientnet_lite0", file), expected)


@pytest.mark.parametrize(("under", "prefix"), [
    ("state_dict", "module."), ("state_dict", "model."), ("model_state_dict", "_orig_mod.module."),
    ("model", "model.backbone."), ("module", "")])
def test_wrappers_and_the_other_library(tmp_path, under, prefix):
    """timm's ResNet in torchvision's; checkpoints of Lightning and DeepSpeed have other things beside it."""
    model = lively(timm.create_model("resnet18"))
    body = {prefix + name: t for name, t in model.state_dict().items()}
    torch.save({under: body, "epoch": 3, "ds_config": {"zero": 0}}, tmp_path / "one.ckpt.pth")
    with torch.no_grad():
        expected = model.eval().forward_features(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(features("torchvision:resnet18", str(tmp_path / "one.ckpt.pth")), expected)


def test_a_wrong_file_names_the_closest_architecture(tmp_path, capsys):
    path = str(tmp_path / "some.pth")
    torch.save(torchvision.models.resnet34().state_dict(), path)
    assert main(["weights", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["closest"] == "torchvision:resnet34"
    assert main(["weights", path, "--backbone", "torchvision:resnet18", "--size", "64"]) == 2
    said = capsys.readouterr().err
    assert "closest architecture: torchvision:resnet34" in said
    sorted_by_name = dict(sorted(renamed(timm.create_model("tf_efficientnet_lite0")).items()))
    save_file({name: t.contiguous() for name, t in sorted_by_name.items()}, str(tmp_path / "sorted.safetensors"))
    assert main(["weights", str(tmp_path / "sorted.safetensors"), "--backbone", "timm:tf_efficientnet_lite0"]) == 2
    assert "tf_efficientnet_lite0" in capsys.readouterr().err


def test_what_is_on_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    for name in ("resnet18", "resnet34"):
        torch.save(torchvision.models.get_model(name).state_dict(), tmp_path / "hub" / "checkpoints" / f"{name}.pth")
    assert main(["weights", "--json"]) == 0
    assert {entry["path"].rpartition("/")[2] for entry in json.loads(capsys.readouterr().out)["files"]} >= {
        "resnet18.pth", "resnet34.pth"}
    assert main(["weights", "--backbone", "torchvision:resnet18", "--size", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "IMAGENET1K_V1" in found["names"]
    assert [entry["path"].rpartition("/")[2] for entry in found["files"]] == ["resnet18.pth"]


def test_mistakes(tmp_path, capsys):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pth")
    cases = {("--out", "a.safetensors"): "--out is for a conversion",
             (str(tmp_path / "x.pth"), "--backbone", "resnet18"): "write torchvision:NAME or timm:NAME",
             (str(tmp_path / "none.pth"),): "no such file",
             (str(tmp_path / "x.pth"), "--backbone", "torchvision:resnet18", "--out", "a.pth"): "must end in"}
    for words, message in cases.items():
        assert main(["weights", *words]) == 2
        assert message in capsys.readouterr().err
