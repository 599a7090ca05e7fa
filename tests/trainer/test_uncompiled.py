"""Optimizers without torch's compiler step, save and load as torch's own do, and a rank imports nothing in vain."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from lacuna.trainer import uncompiled
from tests.helpers.launching import environment

_KINDS = [("Adam", {}), ("AdamW", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9})]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        optimizer.zero_grad()
        net(torch.full((2, 5), number + 1.0)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("kind", "options"), _KINDS)
def test_they_are_torchs_own(kind, options, fused):
    ours, theirs = model(), model()
    one = getattr(uncompiled, kind)(ours.parameters(), lr=0.01, fused=fused, **options)
    two = getattr(torch.optim, kind)(theirs.parameters(), lr=0.01, fused=fused, **options)
    steps(ours, one, 3)
    steps(theirs, two, 3)
    assert torch.equal(ours.weight, theirs.weight)
    assert not torch.equal(ours.weight, model().weight)
    # From one to the other: checkpoints do not tell them apart.
    again = getattr(uncompiled, kind)(ours.parameters(), lr=0.5, fused=fused, **options)
    again.load_state_dict(copy.deepcopy(two.state_dict()))  # loading shares tensors
    steps(ours, again, 2)
    steps(theirs, two, 2)
    assert torch.equal(ours.weight, theirs.weight)
    assert again.state_dict()["param_groups"] == two.state_dict()["param_groups"]


_RANK = """
import sys
from types import SimpleNamespace
import torch
from lacuna.trainer import engine, launch, orphans
from lacuna.trainer.config.files import load_config

weight = torch.nn.Parameter(torch.ones(3))
for kind in ("adam", "adamw", "sgd"):
    optimizer = engine._optimizer([{"params": [weight]}], SimpleNamespace(optimizer=kind, lr=0.1, momentum=0.9), False)
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print(*sys.modules)
"""


def test_a_rank_imports_nothing_in_vain():
    """torch's compiler alone takes as long as DeepSpeed and all of ours together."""
    done = subprocess.run([sys.executable, "-c", _RANK], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    heavy = {"torch._dynamo", "torch._inductor", "sympy", "torchvision", "timm", "ray", "sklearn", "scipy.stats",
             "aiohttp", "s3fs", "pandas", "pyarrow", "onnx"}
    assert not heavy & set(done.stdout.split())
