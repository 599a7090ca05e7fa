"""Accumulation over uneven tails and channels_last change no loss, bf16 reaches the engine, full disks lose nothing."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.trainer.accumulate import carried, check_two_forwards, gather_outputs
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.engine import BatchSplit
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs, Task
from lacuna.trainer.models.classifier import build_model
from tests.helpers.launching import ROOT, Launch, bf16_environment, environment, last_checkpoint, losses, metrics
from tests.helpers.run_configs import config


@pytest.mark.parametrize(("batch", "micro", "world"), [(32, 0, 1), (32, 5, 2), (10, 4, 1), (9, 4, 1), (7, 100, 1)])
def test_a_share_is_cut_into_few_even_pieces(batch, micro, world):
    split = BatchSplit.of(batch, micro, world)
    assert split.share == batch // world
    assert split.micro * (split.pieces - 1) < split.share <= split.micro * split.pieces
    assert micro == 0 or split.micro <= micro


def test_accumulation_and_channels_last_give_the_losses_of_one_piece(digit_shards, tmp_path):
    body = config(digit_shards, "whole", optimizer="sgd", lr=0.05)
    body["phases"], body["method"] = body["phases"][1:], {"name": "an"}
    body["phases"][0]["epochs"] = 1
    off = ("data.val=null", "data.test=null")
    runs = []
    for name, extra in (("whole", ()), ("pieces", ("train.micro_batch=5", "train.channels_last=true"))):
        launch = Launch({**body, "name": name}, tmp_path, 1, *off, *extra)
        launch.ok()
        runs.append(losses(launch.folder))
    lines = (tmp_path / "whole" / "trace" / "rank-0.jsonl").read_text().splitlines()
    sizes = [json.loads(line)["samples"] for line in lines]
    assert len(sizes[-1]) < 32, "the epoch has no uneven tail"
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-5)


class Coupled(torch.nn.Module):
    """Logits, maps and features of a net with dropout."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs):
        features = self.body(inputs)
        logits = self.head(features)
        return Outputs(logits, logits[:, :, None, None] * torch.ones(2, 2), features)


def test_two_forwards_give_the_gradient_of_the_whole_batch_with_the_same_dropout():
    torch.manual_seed(0)
    model, inputs = Coupled(), torch.randn(7, 5)
    pieces, seeds = [inputs[:3], inputs[3:6], inputs[6:], inputs[7:]], [4, 5, 6, 7]

    def loss(outputs):  # no sum over samples
        return outputs.logits.mean().exp() + (outputs.maps.sum() - 1) ** 2 + outputs.features.std()

    found = []
    for piece, seed in zip(pieces, seeds, strict=True):  # one graph over all pieces
        torch.manual_seed(seed)
        found.append(model(piece))
    whole = loss(Outputs(*(torch.cat([getattr(o, name) for o in found]) for name in ("logits", "maps", "features"))))
    expected = torch.autograd.grad(whole, list(model.parameters()))

    gathered = gather_outputs(pieces, model, seeds)
    again = loss(gathered.outputs)
    assert again.item() == whole.item()
    again.backward()
    for piece, seed, gradients in zip(pieces, seeds, gathered.gradients(), strict=True):
        torch.manual_seed(seed)
        carried(model(piece), gradients).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_what_two_forwards_cannot_make_equal_is_refused():
    task = Task(3, 2, np.ones(3), np.zeros(3), False, expected_positives=1.5)
    method = build_method({"name": "epr"}, task)
    data = DataConfig.model_validate({"train": {"url": "unused"}, "image_size": 32})
    for batchnorm in ("local", "frozen"):
        model = build_model(ModelConfig(backbone="torchvision:resnet18", batchnorm=batchnorm), data, 3, 0)
        if batchnorm == "local":
            with pytest.raises(UserError, match=r"'epr' .* train\.micro_batch = 4 cuts.*Set model\.batchnorm=frozen"):
                check_two_forwards(method, "epr", model, 4)
            model.set_trainable("head")  # a fixed backbone stays in evaluation mode
        check_two_forwards(method, "epr", model, 4)
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="own module would need gradients"):
        check_two_forwards(method, "epr", model, 4)


ENGINE = """
import torch
from lacuna.trainer import world
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.engine import build_engine
from lacuna.trainer.models.classifier import build_model
config = parse_config({"name": "x", "data": {"train": {"url": "unused"}, "image_size": 16},
                       "model": {"backbone": "lacuna:tiny"}, "train": {"precision": "bf16"},
                       "phases": [{"name": "a", "epochs": 1, "batch": 2, "lr": 0.1}]}, "x")
model = build_model(config.model, config.data, 3, 0)
engine, _ = build_engine(model, config, config.phases[0], world.start(60))
seen = []
model.backbone[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
logits, *_ = engine(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
print(seen[0], logits.dtype, model.head.weight.dtype)
"""


def test_bf16_is_the_engines_own_setting():
    """Without it the engine switches the caller's autocast off on GPUs, and bf16 would silently be fp32."""
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, cwd=ROOT, timeout=600,
                          env=environment(**bf16_environment()))
    assert "torch.bfloat16 torch.float32 torch.float32" in done.stdout, done.stderr[-2000:]


def test_a_checkpoint_that_cannot_be_written_is_named_and_the_last_one_resumes(digit_shards, tmp_path):
    body = config(digit_shards, "full")
    body["phases"] = body["phases"][1:]
    first = Launch(body, tmp_path, 1, "train.checkpoint_every=3st")
    first.wait_for_step(5)
    largest = max(p.stat().st_size for p in Path(tmp_path).glob("full/checkpoints/*/engine/*"))
    resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, (largest // 2, largest // 2))
    assert first.wait() == 2, first.text()[-3000:]
    assert "this checkpoint could not be written" in first.text()
    newest = last_checkpoint(first.folder)
    again = Launch(body, tmp_path, 1)
    again.ok()
    assert f"resuming from {newest}" in again.text()
    assert len(metrics(again.folder, "result")) == 1
