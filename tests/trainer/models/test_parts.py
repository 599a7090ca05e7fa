"""Parts of a backbone are chosen by their publisher's names; the others keep weights and statistics, bit for bit.

Runs with such a phase, on two ranks and resumed, are in tests/trainer/test_resume.py.
"""

from __future__ import annotations

import copy

import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.trainer.assemble import load_sources, place_model
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.engine import _groups
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.world import World
from tests.helpers.backbones import build, pictures
from tests.helpers.run_configs import config

LITE = "timm:test_efficientnet"  # conv_stem, bn1, blocks (5 stages), conv_head, bn2


def steps(model: Classifier, trainable: tuple[str, ...], phase) -> tuple[dict, dict]:
    """State before and after three steps of Adam over the phase's parameter groups."""
    torch.manual_seed(0)
    model.set_trainable(trainable)
    model.train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(_groups(model, phase))
    for _ in range(3):
        optimizer.zero_grad()
        model(pictures())[0].square().sum().backward()
        optimizer.step()
    return before, model.state_dict()


@pytest.fixture
def phase(digit_shards):
    return parse_config(config(digit_shards, "x", weight_decay=0.1), "x").phases[1]


@pytest.mark.parametrize("batchnorm", ["local", "frozen"])
def test_fixed_parts_keep_weights_and_statistics(batchnorm, phase):
    model = build(LITE, batchnorm=batchnorm)
    before, after = steps(model, ("blocks.4", "conv_head", "bn2"), phase)
    for name, tensor in after.items():
        chosen = name.startswith(("head.", "backbone.body.blocks.4.", "backbone.body.conv_head.", "backbone.body.bn2."))
        statistic = name.endswith(("running_mean", "running_var", "num_batches_tracked"))
        learns = chosen and (batchnorm == "local" or not statistic)
        assert torch.equal(tensor, before[name]) != learns, name
    # The next phase may train everything, and the one after it the head alone.
    before, after = steps(model, "all", phase)
    same = [name for name in after if torch.equal(before[name], after[name])]
    assert all("running" in name or "num_batches" in name for name in same)
    assert bool(same) == (batchnorm == "frozen")
    before, after = steps(model, "head", phase)
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}


def test_fixed_parts_have_no_dropout(phase):
    model = build("torchvision:swin_t")
    model.set_trainable(("features.7", "norm"))
    model.train()
    training = {model.names[name].split(".")[1] for name, module in model.backbone.named_modules()
                if isinstance(module, torch.nn.Dropout) and module.training}
    assert training == {"7"}
    model.eval()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(("backbone", "chosen", "count"), [
    ("torchvision:resnet18", ("layer4.1", "layer4.0.conv1"), 7),
    ("torchvision:densenet121", ("features.norm5",), 2),
    ("timm:vit_tiny_patch16_224", ("pos_embed", "blocks.1", "norm"), 1 + 12 + 2),  # not blocks.10 and blocks.11
    ("lacuna:tiny", ("head", "4", "6"), 4),
])
def test_names_are_the_publishers(backbone, chosen, count):
    model = build(backbone)
    model.set_trainable(chosen)
    learning = [name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad]
    assert len(learning) == count
    parts = {part for part in chosen if part != "head"}
    assert {part for part in parts for name in learning if f"{model.names[name]}.".startswith(f"{part}.")} == parts


def test_an_unknown_part_is_refused_before_training_with_those_that_exist(digit_shards):
    cases = {
        ("timm:test_efficientnet", "block.6"): "parts of it: conv_stem, bn1, blocks, conv_head, bn2.",
        ("timm:test_efficientnet", "blocks.9"): "in its 'blocks' there are blocks.0, blocks.1, blocks.2, blocks.3, ",
        ("timm:test_efficientnet", "global_pool"): "has no such part with weights",
        ("torchvision:resnet18", "layer4.7.conv1"): "in its 'layer4' there are layer4.0, layer4.1.",
        ("torchvision:resnet18", "7"): "parts of it: conv1, bn1, layer1, layer2, layer3, layer4.",
    }
    for (backbone, part), message in cases.items():
        body = config(digit_shards, "x")
        body["model"]["backbone"] = backbone
        body["phases"][1]["trainable"] = ["head", part]
        parsed = parse_config(body, "x")
        with pytest.raises(UserError) as caught:
            place_model(parsed, load_sources(parsed)["train"], World(torch.device("cpu")))
        assert f"phases.1.trainable names {part!r}, but model.backbone = {backbone!r}" in str(caught.value)
        assert message in str(caught.value), part
