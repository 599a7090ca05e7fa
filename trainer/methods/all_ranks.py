"""Rows of tensors on every rank, as tensors that all ranks have."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lacuna.trainer.world import World


def rows_of_all_ranks(world: World, *parts: torch.Tensor) -> list[torch.Tensor]:
    """[M, …] of all ranks' [m, …], in rank order, for parts of one length m; differentiable in this rank's (see
    World.global_sum)."""
    if world.size == 1:
        return list(parts)
    mine = len(parts[0])
    counts = world.gather(mine)  # from host to host: reading them does not wait for a device
    before = sum(counts[: world.rank])
    after = sum(counts) - before - mine
    return [world.global_sum(F.pad(part, (0, 0) * (part.dim() - 1) + (before, after))) for part in parts]
