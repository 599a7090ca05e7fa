"""torch's optimizers without its compiler: their methods import it to be left alone by it, which costs a rank a second.

A run that compiles its model takes torch's own classes.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class Uncompiled:
    """What Optimizer wraps for the compiler, as it is inside."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


# The wrapper of `step` also switches gradients off.
class Adam(Uncompiled, torch.optim.Adam):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(Uncompiled, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Adamax(Uncompiled, torch.optim.Adamax):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adamax.step))


class SGD(Uncompiled, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
