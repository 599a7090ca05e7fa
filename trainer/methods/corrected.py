"""Labels that a method corrects for good: one bit per sample and class, set once and never cleared."""

from __future__ import annotations

import torch

from lacuna.data_pipelines.labels import POSITIVE
from lacuna.state_store import Field
from lacuna.trainer.methods.base import unknown

CORRECTED = "corrected"


def corrected_field(classes: int) -> Field:
    """All bits start at 0; a shard without corrections is never written."""
    return Field(CORRECTED, (classes,), "bits")


def with_corrected(labels: torch.Tensor, corrected: torch.Tensor) -> torch.Tensor:
    """Labels int8 [B, L] in which unknown entries that were corrected are positives."""
    return torch.where(unknown(labels) & corrected, POSITIVE, labels)
