"""A checkpoint goes on with another number of ranks, also where one has nothing of a parameter group, and loaded
moments fit their parameters, so that a fused step after a resume equals the plain one."""

from __future__ import annotations

import copy
import signal

import numpy as np
import pytest
import torch

from lacuna.trainer.checkpoints.conversion import fit_moments
from tests.helpers.launching import Launch, losses, trace, weights
from tests.helpers.run_configs import config


@pytest.mark.long
def test_ranks_with_nothing_of_a_group(digit_shards, tmp_path):
    """A head of ten classes whose bias is a group of its own: ten numbers, of which the last of 4 ranks has none."""
    def body(name: str) -> dict:
        made = config(digit_shards, name)
        made["data"] |= {"val": None, "test": None}
        made["phases"] = [{**made["phases"][0], "epochs": 2, "weight_decay": 0.01}]
        made["train"] |= {"deepspeed": "zero1", "ema_decay": 0.0}
        return made

    peace = Launch(body("peace"), tmp_path, 2)
    peace.ok()
    for ranks, step in ((2, 7), (4, 12)):
        launch = Launch(body("run"), tmp_path, ranks)
        launch.wait_for_step(step)
        launch.signal_all(signal.SIGKILL)
        launch.wait()
    assert "converting the checkpoint from 2 to 4 ranks" in launch.text()
    last = Launch(body("run"), tmp_path, 2)
    last.ok()
    assert "converting the checkpoint from 4 to 2 ranks" in last.text()
    assert trace(last.folder) == trace(peace.folder)
    np.testing.assert_allclose(losses(last.folder), losses(peace.folder), rtol=2e-3)
    for name, value in weights(last.folder).items():
        torch.testing.assert_close(value, weights(peace.folder)[name], rtol=1e-2, atol=1e-2)


def trained(kind, memory_format, **options) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 8, 3).to(memory_format=memory_format)
    optimizer = kind(layer.parameters(), lr=0.01, **options)
    for seed in range(3):
        step(layer, optimizer, seed)
    return layer, optimizer


def step(layer: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    layer(images).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})])
def test_another_memory_format(kind, options):
    """As when train.channels_last is switched on for the rest of a run."""
    layer, optimizer = trained(kind, torch.contiguous_format, fused=False, **options)
    resumed = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    fused = kind(resumed.parameters(), lr=0.01, fused=True, **options)
    moments = copy.deepcopy(optimizer.state_dict())
    moments["param_groups"] = fused.state_dict()["param_groups"]
    fused.load_state_dict(moments)
    assert any(value.shape == p.shape and value.stride() != p.stride() for p, state in fused.state.items()
               for value in state.values() if isinstance(value, torch.Tensor)), "nothing to repair: no test"
    fit_moments(fused)
    for seed in (3, 4):
        step(layer, optimizer, seed)
        step(resumed, fused, seed)
    torch.testing.assert_close(resumed.weight.contiguous(), layer.weight, rtol=1e-5, atol=1e-7)


def test_step_numbers_go_where_the_parameters_are():
    layer, optimizer = trained(torch.optim.Adam, torch.contiguous_format, fused=True)
    parameter = layer.weight
    optimizer.state[parameter]["step"] = torch.tensor(3.0, device="meta")  # stands for another device
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        fit_moments(optimizer)
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    before = {name: value.data_ptr() for name, value in optimizer.state[parameter].items()}
    fit_moments(optimizer)
    assert before == {name: value.data_ptr() for name, value in optimizer.state[parameter].items()}, "what fits is kept"
