"""Accumulation over uneven tails and channels_last change no loss, bf16 reaches the engine, full disks lose nothing."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT, Launch, environment, last_checkpoint, losses, metrics
from test_resume import config

from trainer.engine import BatchSplit


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


ENGINE = """
import torch
from trainer import world
from trainer.config import parse_config
from trainer.engine import build_engine
from trainer.models import build_model
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
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, env=environment(), cwd=ROOT,
                          timeout=60)
    assert "torch.bfloat16 torch.float32 torch.float32" in done.stdout, done.stderr[-2000:]


def test_a_checkpoint_that_cannot_be_written_is_named_and_the_last_one_resumes(digit_shards, tmp_path):
    body = config(digit_shards, "full")
    body["phases"] = body["phases"][1:]
    first = Launch(body, tmp_path, 1, "train.checkpoint_every=3st")
    first.wait_for_step(5)
    largest = max(p.stat().st_size for p in Path(tmp_path).glob("full/checkpoints/*/engine/*"))
    resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, (largest // 2, largest // 2))
    assert first.wait(60) == 2, first.text()[-3000:]
    assert "this checkpoint could not be written" in first.text()
    newest = last_checkpoint(first.folder)
    again = Launch(body, tmp_path, 1)
    again.ok()
    assert f"resuming from {newest}" in again.text()
    assert len(metrics(again.folder, "result")) == 1
