"""ROLE's label estimator `network`: φ = W₂·relu(W₁·h + b₁) + b₂ on the image's pooled features h, no state per sample.

The weights are shared by all samples and live in the checkpoint; h is a constant, so the estimator does not move the
backbone. There is no logit of a single entry that could start at its annotation: annotated entries are held by their
terms of the loss. W₂ and b₂ start at 0, hence every estimate at 0.5. Legend: B batch rows, D features, L classes.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import Masked, Outputs, Step
from lacuna.trainer.methods.class_parameters import ClassParameters
from lacuna.trainer.methods.role.dense import Estimate, Estimator

_FIRST_LAYER = 0x57  # tells its draws from those of other estimators


class Network(Estimator):
    """State: none per sample; two layers for all."""

    def __init__(self, s, task, lr):
        super().__init__(s, task, lr)
        shape = (s.hidden, task.width)
        draws = uniform_array(mix(task.seed, _FIRST_LAYER, 0), np.arange(shape[0] * shape[1])).reshape(shape)
        bound = 1 / math.sqrt(max(1, task.width))
        self.shared = ClassParameters({
            "hidden.weight": torch.from_numpy(((2 * draws - 1) * bound).astype(np.float32)),
            "hidden.bias": torch.zeros(s.hidden),
            "labels.weight": torch.zeros(task.classes, s.hidden), "labels.bias": torch.zeros(task.classes),
        }, s.optimizer != "sgd")
        self.learners = [self.shared]

    def read(self, outputs: Outputs, batch: Batch, step: Step) -> Estimate:
        h = outputs.features.detach().float()
        h = h.mean((2, 3)) if h.ndim == 4 else h
        values = self.shared.to(h.device)
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            inner = torch.relu(h @ leaves["hidden.weight"].T + leaves["hidden.bias"])
            phi = inner @ leaves["labels.weight"].T + leaves["labels.bias"]
        return Estimate(phi.detach(), torch.zeros_like(phi), (phi, leaves))

    def learn(self, estimate: Estimate, gradient: torch.Tensor, step: Step) -> dict[str, torch.Tensor | Masked]:
        phi, leaves = estimate.parts
        gradients = torch.autograd.grad(phi, list(leaves.values()), gradient)
        self.shared.update(dict(zip(leaves, gradients, strict=True)), step, self.s.class_lr)
        return {}
