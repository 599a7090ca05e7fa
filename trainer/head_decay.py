"""Decay of the head towards the vectors that it started from, instead of towards 0: phases.N.head_decay_to.

Legend: W the head's weights [L, D], W₀ what model.head_init made of them, λ the head's decay.
    λ/2·‖W − W₀‖² = λ/2·‖W‖² − λ·⟨W, W₀⟩ + constant
The optimizer's own (coupled) decay is the first term; the second is added to the loss, once per global batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lacuna.basics.errors import UserError
from lacuna.trainer.config.sections import Config

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run


def check_head_decay(config: Config) -> None:
    for number, phase in enumerate(config.phases):
        if phase.head_decay_to == "zero":
            continue
        key = f"phases.{number}.head_decay_to = 'head_init'"
        if config.model.head_init is None or config.model.head != "linear":
            raise UserError(f"{key} needs model.head_init=FILE and model.head=linear; model.head_init is "
                            f"{config.model.head_init}, model.head is {config.model.head}.")
        if phase.optimizer == "adamw" or not phase.decay_of_head:
            raise UserError(f"{key} moves the aim of a coupled decay: it needs optimizer adam or sgd (here "
                            f"{phase.optimizer}) and a head_weight_decay above 0 (here {phase.decay_of_head}).")


def pull_to_start(run: Run, number: int) -> torch.Tensor | None:
    """λ·W₀ [L, D] of a phase; None where decay is towards 0."""
    if run.config.phases[number].head_decay_to == "zero":
        return None
    start = run.model.head_start
    assert start is not None, "check_head_decay"
    return run.config.phases[number].decay_of_head * start
