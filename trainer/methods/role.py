"""ROLE of Cole et al. (CVPR 2021): classifier and label estimates teach each other, towards k positives per image.

Reduction: sum over classes / L, mean over the global batch; the two regularisers are added undivided.
State: `phi` (logits of the label estimates) and Adam's moments of every sample, with the step of the last visit.
Gradients stop between the two sides, so φ's gradient has a closed form and φ is no DeepSpeed parameter: rows are read,
brought up to date (lazy_adam.py), updated and written back within the visit.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field as Setting

from data_pipelines.hashing import mix, uniform_array
from data_pipelines.labels import NEGATIVE, POSITIVE
from data_pipelines.stream import Batch
from state_store import Field, Given
from trainer.methods import lazy_adam
from trainer.methods.base import (
    LossTerms,
    Method,
    Outputs,
    Settings,
    Step,
    Task,
    expected_positives,
    negative,
    positive,
)
from trainer.methods.cole import expected_positives_penalty, log_loss

_EPSILON = 1e-5
_KNOWN = 5.293305  # logit(0.995): where the estimate of an annotated class starts
_SPREAD = 0.405465  # logit(0.6): others start uniform in ± this
_CLAMP = 11.512915  # logit(1 − 1e-5): the hand-over between phases goes through a clamped probability


class RoleSettings(Settings):
    expected_positives: float | None = Setting(None, gt=0)
    """k, mean positives per image (VOC 1.5, COCO 2.9, NUS 1.9, CUB 31.4); by default that of the validation images."""
    lr: Annotated[float, Setting(gt=0)] | list[Annotated[float, Setting(gt=0)]] = 1e-2
    """φ's own learning rate, constant in a phase (paper: 10 × the classifier's); a list gives one per phase, the last
    repeats. How far φ travels decides whether ROLE works."""
    optimizer: str = Setting("adam", pattern="^(adam|sgd|rowwise)$")
    """adam: equal to dense Adam over all samples (paper); sgd: no moments; rowwise: Adam that counts a row's visits."""
    phi_dtype: str = Setting("float32", pattern="^(float32|float16)$")
    """float16 halves φ on disk; it is rounded stochastically."""


class Role(Method):
    paper = "Cole et al., Multi-Label Learning from Single Positive Labels, CVPR 2021"
    published: ClassVar = {"voc12": 87.9, "coco14": 66.3, "nus": 43.1, "cub": 15.0}
    settings_type = RoleSettings
    batch_coupled = True

    def __init__(self, settings: RoleSettings, task: Task):
        super().__init__(settings, task)
        self.s = settings
        self.k = expected_positives(settings.expected_positives, task)
        self.phase_steps: list[int] = []  # Adam steps behind the φ that each finished phase handed over

    def lr(self, phase: int) -> float:
        lrs = self.s.lr if isinstance(self.s.lr, list) else [self.s.lr]
        return lrs[min(phase, len(lrs) - 1)]

    # ---- state

    def fields(self) -> list[Field]:
        classes = (self.task.classes,)
        found = [Field("phi", classes, self.s.phi_dtype, Given("role"), stochastic=self.s.phi_dtype == "float16"),
                 Field("visit", (2,), "int32")]  # phase (from 1; 0: never) and step of the last visit
        if self.s.optimizer != "sgd":
            found += [Field("phi_m", classes, "float32"), Field("phi_v", classes, "float32")]
        return found

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        draws = uniform_array(mix(self.task.seed, shard), np.arange(labels.size)).reshape(labels.shape)
        phi = (2 * draws - 1) * _SPREAD
        phi = np.where(labels == POSITIVE, _KNOWN, phi)
        return np.where(labels == NEGATIVE, -_KNOWN, phi).astype(np.float32)

    def end_phase(self, steps: int) -> None:
        self.phase_steps.append(steps)

    def state(self) -> dict[str, torch.Tensor]:
        return {"phase_steps": torch.tensor(self.phase_steps, dtype=torch.int64)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.phase_steps = state["phase_steps"].tolist()

    # ---- loss

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        assert step.state is not None
        phi, m, v, last = self._current(step)
        p, estimate = torch.sigmoid(outputs.logits), torch.sigmoid(phi)
        taught = self._terms(outputs.logits, estimate, batch.labels).mean(1)
        estimated = self._terms(phi, p.detach(), batch.labels).mean(1)
        penalty = expected_positives_penalty(p, self.k, step)
        pull = step.world.global_sum(estimate.sum()) / step.samples - self.k
        gradient = self._gradient(phi, estimate, p.detach(), batch.labels, float(pull), step)
        rows = self._updated(phi, m, v, gradient, last, step)
        coupled = (penalty + (pull / phi.shape[1]) ** 2) / 2
        return LossTerms((taught + estimated) / 2, coupled, rows)

    def _terms(self, logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Known entries, plus the cross entropy towards the other side's probabilities (a constant)."""
        as_positive, as_negative = log_loss(logits)
        cross = teacher * as_positive + (1 - teacher) * as_negative
        known = torch.where(positive(labels), as_positive, 0.0)
        return cross + torch.where(negative(labels), as_negative, known)

    def _gradient(self, phi, estimate, p, labels, pull: float, step: Step) -> torch.Tensor:
        """∂ global loss / ∂φ of this rank's rows."""
        rest = torch.sigmoid(-phi)
        towards_1 = p + positive(labels).to(p.dtype)
        towards_0 = (1 - p) + negative(labels).to(p.dtype)
        slope = -towards_1 / (estimate + _EPSILON) + towards_0 / (rest + _EPSILON)
        classes = phi.shape[1]
        slope = slope / (2 * step.samples * classes) + pull / (step.samples * classes**2)
        return slope * estimate * rest

    def _current(self, step: Step):
        """(φ, m, v, last step) of the batch's rows, replayed up to the step before this one."""
        assert step.state is not None
        visit = step.state.read("visit").cpu().numpy().astype(np.int64)
        phi = step.state.read("phi")
        if self.s.optimizer == "sgd":
            return self._handed_over(phi, visit, step), None, None, visit[:, 1]
        m, v = step.state.read("phi_m"), step.state.read("phi_v")
        if self.s.optimizer == "adam":
            for phase, steps in enumerate(self.phase_steps, 1):
                here = visit[:, 0] == phase
                if here.any():
                    at = torch.from_numpy(np.flatnonzero(here)).to(phi.device)
                    moved = lazy_adam.replay(phi[at], m[at], v[at], visit[here, 1], steps, self.lr(phase - 1))
                    phi[at] = moved[0]
        phi = self._handed_over(phi, visit, step)
        old = torch.from_numpy(visit[:, 0] != step.phase + 1).to(phi.device)[:, None]
        m, v = torch.where(old, 0.0, m), torch.where(old, 0.0, v)
        last = np.where(visit[:, 0] == step.phase + 1, visit[:, 1], 0)
        if self.s.optimizer == "adam":
            phi, m, v = lazy_adam.replay(phi, m, v, last, step.number, self.lr(step.phase))
        return phi, m, v, last

    def _handed_over(self, phi: torch.Tensor, visit: np.ndarray, step: Step) -> torch.Tensor:
        """φ of rows last seen in an earlier phase went through a clamped probability."""
        earlier = torch.from_numpy((visit[:, 0] > 0) & (visit[:, 0] <= step.phase)).to(phi.device)
        return torch.where(earlier[:, None], phi.clamp(-_CLAMP, _CLAMP), phi)

    def _updated(self, phi, m, v, gradient, last: np.ndarray, step: Step) -> dict:
        now = np.full(len(last), step.number + 1)
        if self.s.optimizer == "sgd":
            phi = phi - self.lr(step.phase) * gradient
            rows = {"phi": phi}
        else:
            count: torch.Tensor | int = step.number + 1
            if self.s.optimizer == "rowwise":
                now = last + 1
                count = torch.from_numpy(now.astype(np.float32)).to(phi.device)[:, None]
            phi, m, v = lazy_adam.step(phi, m, v, gradient, count, self.lr(step.phase))
            rows = {"phi": phi, "phi_m": m, "phi_v": v}
        visit = np.stack([np.full(len(last), step.phase + 1), now], axis=1)
        return {**rows, "visit": torch.from_numpy(visit)}
