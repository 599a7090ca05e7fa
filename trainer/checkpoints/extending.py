"""When a run may go on with another number of epochs than it began with, and what to do when it may not."""

from __future__ import annotations

from lacuna.basics.errors import UserError
from lacuna.trainer.checkpoints.checkpoint import Checkpoint
from lacuna.trainer.checkpoints.commits import MODEL
from lacuna.trainer.config.sections import Config, PhaseConfig


def check_epochs(config: Config, checkpoint: Checkpoint, method_counts_them: bool) -> None:
    """UserError unless what was trained so far is what a run with the new numbers would have trained."""
    at = checkpoint.position
    for number, (phase, old) in enumerate(zip(config.phases, checkpoint.epochs, strict=True)):
        if phase.epochs == old or number > at.phase:
            continue
        found = f"phases.{number}.epochs: {old} → {phase.epochs}"
        done = at.epoch + (1 if at.step else 0)
        if number < at.phase:
            raise UserError(f"{found}: this phase of {config.folder} is over. {_otherwise(checkpoint, old)}")
        if phase.epochs < done:
            raise UserError(f"{found}: {done} epochs of this phase have begun. Give {done} or more, or use another "
                            "name=….")
        reason = _reason(phase, config.method["name"], method_counts_them)
        if reason:
            raise UserError(f"{found}: {reason}, so what was trained so far would have been trained differently. "
                            f"{_otherwise(checkpoint, old)}")


def _reason(phase: PhaseConfig, method: str, method_counts_them: bool) -> str:
    if phase.schedule != "constant":
        return f"schedule = {phase.schedule!r} spans the whole phase"
    if phase.warmup.strip().endswith("%"):
        return f"warmup = {phase.warmup!r} is a part of the phase"
    return f"method {method!r} changes over the epochs of a phase" if method_counts_them else ""


def _otherwise(checkpoint: Checkpoint, old: int) -> str:
    return (f"Keep {old}, or begin another run (name=…) from these weights: "
            f"model.weights={checkpoint.url}/{MODEL}")
