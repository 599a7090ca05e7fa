"""Parameters that a method shares over all samples: equal on every rank, in the checkpoint, with an Adam of their own.

They are no part of the DeepSpeed engine: their gradients are sums over the ranks of the global loss's gradient, so
that every rank takes the same step.
"""

from __future__ import annotations

import torch

from lacuna.trainer.methods.base import Step
from lacuna.trainer.methods.role import lazy_adam
from lacuna.trainer.on_device.uploads import to_device


class ClassParameters:
    def __init__(self, values: dict[str, torch.Tensor], adam: bool = True):
        self.values, self.adam = values, adam
        self.end_phase(0)

    def end_phase(self, steps: int) -> None:
        """The next phase starts from the values with new moments."""
        self.moments = {name: torch.zeros(2, *value.shape) for name, value in self.values.items()}

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The values, on the training device from now on."""
        self.values = {name: to_device(value, device) for name, value in self.values.items()}
        self.moments = {name: to_device(value, device) for name, value in self.moments.items()}
        return self.values

    def update(self, gradients: dict[str, torch.Tensor], step: Step, lr: float) -> None:
        """One step with this rank's gradients; every rank takes part, with an empty batch too."""
        packed = torch.cat([gradients[name].flatten() for name in self.values])
        packed = step.world.global_sum(packed)
        sizes = [value.numel() for value in self.values.values()]
        for (name, value), part in zip(self.values.items(), packed.split(sizes), strict=True):
            gradient = part.view_as(value)
            if self.adam:
                m, v = self.moments[name]
                self.values[name], m, v = lazy_adam.step(value, m, v, gradient, step.number + 1, lr)
                self.moments[name] = torch.stack([m, v])
            else:
                self.values[name] = value - lr * gradient

    def state(self) -> dict[str, torch.Tensor]:
        return {**self.values, **{f"{name}.moments": value for name, value in self.moments.items()}}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.values = {name: state[name] for name in self.values}
        self.moments = {name: state[f"{name}.moments"] for name in self.values}
