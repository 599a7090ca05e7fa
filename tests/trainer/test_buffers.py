"""BatchNorm statistics (`local`) go along when a ZeRO checkpoint is converted to another number of ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from lacuna.trainer import world
from lacuna.trainer.assemble import build_run
from lacuna.trainer.checkpoints.commits import MODEL
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.phase import Phase
from tests.helpers.launching import Launch
from tests.helpers.run_configs import config


@pytest.mark.long
@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_statistics_survive_a_conversion(digit_shards, tmp_path, stage):
    """The checkpoint holds rank 0's, with which validation was done: one rank goes on from exactly those."""
    body = config(digit_shards, "run")
    body["data"] |= {"val": None, "test": None}
    body["model"] = {"backbone": "timm:test_resnet", "batchnorm": "local", "expected_positives": 2.2}
    body["phases"] = [{**body["phases"][1], "epochs": 50}]
    body["train"] |= {"deepspeed": stage, "ema_decay": 0.0}
    launch = Launch(body, tmp_path, 2)
    launch.wait_for_step(7)
    launch.signal_all(signal.SIGKILL)
    launch.wait()

    with world.joined(120) as joined:
        watchdog = world.Watchdog(joined, 120, print)
        try:
            run = build_run(parse_config({**body, "run_folder": str(tmp_path)}, "test"), joined, watchdog)
            fresh = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
            checkpoint = run.checkpoints.begin_launch()
            assert checkpoint is not None
            assert (checkpoint.world, checkpoint.position.total_steps) == (2, 5)
            phase = Phase(run, 0, checkpoint)
            expected = load_file(os.path.join(checkpoint.folder, MODEL))
            found = dict(run.model.named_buffers())
            counted = [name for name in found if name.endswith("num_batches_tracked")]
            assert counted
            assert all(int(found[name]) == 5 for name in counted), "every step of rank 0 was counted"
            assert any(not torch.equal(found[name], fresh[name]) for name in found if name.endswith("running_mean"))
            assert expected.keys() >= {*counted, *dict(run.model.named_parameters())}
            for name, value in run.model.state_dict().items():
                assert torch.equal(value, expected[name]), name
            phase.close()
        finally:
            watchdog.stop()
