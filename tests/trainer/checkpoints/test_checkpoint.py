"""Loaded moments fit their parameters, so that a fused step after a resume equals the plain one."""

from __future__ import annotations

import copy

import pytest
import torch

from lacuna.trainer.checkpoints.checkpoint import fit_moments


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
