"""ROLE of Cole et al. (CVPR 2021): classifier and label estimates teach each other, towards k positives per image.

Reduction: sum over classes / L, mean over the global batch; the two regularisers are added undivided.
Gradients stop between the two sides, so the gradient by the estimates' logits φ has a closed form, and φ is no
DeepSpeed parameter: an estimator (role_dense.py, role_topk.py, role_factorized.py, role_network.py) gives φ [B, L] of
a batch, and learns from that gradient within the visit.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field as Setting

from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field
from lacuna.trainer.methods.base import (
    LossTerms,
    Method,
    Needs,
    Outputs,
    Settings,
    Step,
    Task,
    expected_positives,
    negative,
    positive,
)
from lacuna.trainer.methods.cole import expected_positives_penalty, log_loss
from lacuna.trainer.methods.role.dense import Dense, Estimator
from lacuna.trainer.methods.role.factorized import Factorized
from lacuna.trainer.methods.role.network import Network
from lacuna.trainer.methods.role.topk import TopK

_EPSILON = 1e-5
ESTIMATORS: dict[str, type[Estimator]] = {"dense": Dense, "topk": TopK, "factorized": Factorized,
                                          "network": Network}


class EstimateSettings(Settings):
    """What the methods that estimate every sample's labels have in common."""

    estimator: str = "dense"
    lr: Annotated[float, Setting(gt=0)] | list[Annotated[float, Setting(gt=0)]] = 1e-2
    """φ's own learning rate, constant in a phase (paper: 10 × the classifier's); a list gives one per phase, the last
    repeats. How far φ travels decides whether ROLE works."""
    optimizer: str = Setting("adam", pattern="^(adam|sgd|rowwise)$")
    """adam: equal to dense Adam over all samples (paper); sgd: no moments; rowwise: Adam that counts a row's visits."""
    phi_dtype: str = Setting("float32", pattern="^(float32|float16)$")
    """float16 halves φ on disk (dense and topk); it is rounded stochastically."""


class RoleSettings(EstimateSettings):
    estimator: Literal["dense", "topk", "factorized", "network"] = "dense"
    """dense: a logit for every entry (paper); topk: for the top_k most likely ones of a sample, the others count as
    negative; factorized: a product of sample and class factors; network: a small head on the features."""
    top_k: int = Setting(50, gt=0)
    """topk: tracked entries per sample, annotated positives among them."""
    rank: int = Setting(32, gt=0)
    """factorized: factors per sample and class."""
    hidden: int = Setting(256, gt=0)
    """network: width of the hidden layer."""
    class_lr: float = Setting(1e-3, gt=0)
    """factorized and network: learning rate of what all samples share, which every step moves. On COCO features a
    factorized estimator did better with 1e-2."""


class Role(Method[EstimateSettings]):
    paper = "Cole et al., Multi-Label Learning from Single Positive Labels, CVPR 2021"
    class_state: ClassVar = {"phase_steps": "int64 [finished phases]", "table (factorized)": "float32 [L, rank + 1]",
                             "hidden, labels (network)": "float32 [hidden, D + 1], [L, hidden + 1]"}

    settings_type: ClassVar[type[Settings]] = RoleSettings

    def __init__(self, settings: EstimateSettings, task: Task):
        super().__init__(settings, task)
        self.s = settings
        self.k = expected_positives(task)
        self.estimator = ESTIMATORS[settings.estimator](settings, task, self.lr)

    def needs(self) -> Needs:
        return Needs(whole_batch=True)

    def lr(self, phase: int) -> float:
        lrs = self.s.lr if isinstance(self.s.lr, list) else [self.s.lr]
        return lrs[min(phase, len(lrs) - 1)]

    def fields(self) -> list[Field]:
        return self.estimator.fields()

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        return self.estimator.initial_rows(field, labels, shard)

    def end_phase(self, steps: int) -> None:
        self.estimator.end_phase(steps)

    def state(self) -> dict[str, torch.Tensor]:
        return self.estimator.state()

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.estimator.load_state(state)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        given = self.estimator.read(outputs, batch, step)
        phi = given.phi
        p, estimate = torch.sigmoid(outputs.logits), torch.sigmoid(phi)
        taught = self._terms(outputs.logits, estimate, batch.labels).mean(1)
        estimated = self._terms(phi, p.detach(), batch.labels).mean(1)
        penalty = expected_positives_penalty(p, self.k, step)
        pull = step.world.global_sum(estimate.sum()) / step.samples - self.k
        gradient = self._gradient(phi, estimate, p.detach(), batch.labels, pull, step)
        travel = self.estimator.travel(given, batch.labels)
        rows = self.estimator.learn(given, gradient, step)
        coupled = (penalty + (pull / phi.shape[1]) ** 2) / 2
        return LossTerms((taught + estimated) / 2, coupled, rows, {"phi_travel": travel})

    def _terms(self, logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Known entries, plus the cross entropy towards the other side's probabilities (a constant)."""
        as_positive, as_negative = log_loss(logits)
        cross = teacher * as_positive + (1 - teacher) * as_negative
        known = torch.where(positive(labels), as_positive, 0.0)
        return cross + torch.where(negative(labels), as_negative, known)

    def _gradient(self, phi, estimate, p, labels, pull: torch.Tensor, step: Step) -> torch.Tensor:
        """∂ global loss / ∂φ of this rank's rows."""
        rest = torch.sigmoid(-phi)
        towards_1 = p + positive(labels).to(p.dtype)
        towards_0 = (1 - p) + negative(labels).to(p.dtype)
        slope = -towards_1 / (estimate + _EPSILON) + towards_0 / (rest + _EPSILON)
        classes = phi.shape[1]
        # float64: the divisor may have more digits than a float32.
        push = (pull.detach().double() / (step.samples * classes**2)).to(slope.dtype)
        slope = slope / (2 * step.samples * classes) + push
        return slope * estimate * rest
