"""Rows of a tensor on every rank, as one tensor that all ranks have."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainer.world import World


def rows_of_all_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """[M, …] of all ranks' [m, …], in rank order; differentiable in this rank's (see World.global_sum)."""
    counts = world.all_gather(torch.tensor([len(values)], device=values.device)).flatten().tolist()
    before = sum(counts[: world.rank])
    after = sum(counts) - before - len(values)
    return world.global_sum(F.pad(values, (0, 0) * (values.dim() - 1) + (before, after)))
