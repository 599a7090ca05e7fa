"""Optimisers of one field of rows that are read, updated and written back within a visit: adam, sgd, rowwise.

`adam` equals one dense Adam over the rows of all samples (lazy_adam.py). Steps count from 0 in every phase, and a new
phase starts with new moments: a row stores the phase and the step of its last visit. Legend: B rows, Q values a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.state_store import Field
from lacuna.trainer.methods.base import Masked, Step
from lacuna.trainer.methods.role import lazy_adam
from lacuna.trainer.on_device.uploads import to_device


@dataclass
class Current:
    """A batch's rows as they stand before this step."""

    values: torch.Tensor  # float32 [B, Q]
    m: torch.Tensor | None  # Adam's moments, [B, Q]; None with sgd
    v: torch.Tensor | None
    last: np.ndarray  # int64 [B]: step of the last visit in this phase (rowwise: visits), 0 if there was none


class RowOptimizer:
    """Of the field `name`, with its moments in `prefix`_m and `prefix`_v and the last visit in `visit`."""

    def __init__(self, name: str, prefix: str, kind: str, lr: Callable[[int], float], clamp: float | None = None):
        self.name, self.prefix, self.kind, self.lr, self.clamp = name, prefix, kind, lr, clamp
        self.phase_steps: list[int] = []  # steps behind the values that each finished phase handed over

    def fields(self, values: Field) -> list[Field]:
        found = [values, Field("visit", (2,), "int32")]  # phase (from 1; 0: never) and step of the last visit
        if self.kind != "sgd":
            found += [Field(f"{self.prefix}_{moment}", values.shape, "float32") for moment in "mv"]
        return found

    def end_phase(self, steps: int) -> None:
        self.phase_steps.append(steps)

    def state(self) -> dict[str, torch.Tensor]:
        return {"phase_steps": torch.tensor(self.phase_steps, dtype=torch.int64)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.phase_steps = state["phase_steps"].tolist()

    def read(self, step: Step) -> Current:
        """The batch's rows, replayed up to the step before this one."""
        visit = step.state.codes("visit").astype(np.int64)  # on the host: it decides what is computed
        values = step.state.read(self.name)
        last = np.where(visit[:, 0] == step.phase + 1, visit[:, 1], 0)
        if self.kind == "sgd":
            return Current(self._handed_over(values, visit, step), None, None, last)
        m, v = step.state.read(f"{self.prefix}_m"), step.state.read(f"{self.prefix}_v")
        if self.kind == "adam":
            for phase, steps in enumerate(self.phase_steps, 1):
                here = visit[:, 0] == phase
                if here.any():
                    at = to_device(np.flatnonzero(here), values.device)
                    moved = lazy_adam.replay(values[at], m[at], v[at], visit[here, 1], steps, self.lr(phase - 1))
                    values[at] = moved[0]
        values = self._handed_over(values, visit, step)
        old = to_device(visit[:, 0] != step.phase + 1, values.device)[:, None]
        m, v = torch.where(old, 0.0, m), torch.where(old, 0.0, v)
        if self.kind == "adam":
            values, m, v = lazy_adam.replay(values, m, v, last, step.number, self.lr(step.phase))
        return Current(values, m, v, last)

    def _handed_over(self, values: torch.Tensor, visit: np.ndarray, step: Step) -> torch.Tensor:
        """Logits of rows last seen in an earlier phase went through a clamped probability."""
        if self.clamp is None:
            return values
        earlier = to_device((visit[:, 0] > 0) & (visit[:, 0] <= step.phase), values.device)
        return torch.where(earlier[:, None], values.clamp(-self.clamp, self.clamp), values)

    def updated(self, current: Current, gradient: torch.Tensor, step: Step) -> dict[str, torch.Tensor | Masked]:
        """New rows of all fields after this step with the given gradient [B, Q]."""
        lr = self.lr(step.phase)
        now = np.full(len(current.last), step.number + 1)
        rows: dict[str, torch.Tensor | Masked]
        if current.m is None or current.v is None:
            rows = {self.name: current.values - lr * gradient}
        else:
            count: torch.Tensor | int = step.number + 1
            if self.kind == "rowwise":
                now = current.last + 1
                count = to_device(now.astype(np.float32), gradient.device)[:, None]
            values, m, v = lazy_adam.step(current.values, current.m, current.v, gradient, count, lr)
            rows = {self.name: values, f"{self.prefix}_m": m, f"{self.prefix}_v": v}
        visit = np.stack([np.full(len(now), step.phase + 1), now], axis=1)
        return {**rows, "visit": torch.from_numpy(visit)}
