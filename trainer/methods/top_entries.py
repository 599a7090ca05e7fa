"""The k largest entries, exactly: per row over many classes, and over the global batch of all ranks.

Legend: R rows, C columns, W ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lacuna.trainer.world import World


def top_entries(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, columns), both [R, min(k, C)] and unsorted, of each row's largest entries; ties are cut arbitrarily.

    The k largest entries lie in the k groups with the largest maxima. Selecting groups first and then among their
    members looks at C/g + k·g entries instead of C: 2.5 times faster than torch.topk at C = 9,600, k = 200, with
    shapes that do not depend on the data.
    """
    rows, columns = values.shape
    k = min(k, columns)
    size = math.isqrt(columns // k) if k else 0
    if size < 2:
        return torch.topk(values, k, dim=1, sorted=False)
    groups = -(-columns // size)
    if groups * size > columns:
        values = F.pad(values, (0, groups * size - columns), value=-math.inf)
    padded = values.reshape(rows, size, groups)
    best = padded.amax(1).topk(k, dim=1, sorted=False).indices
    members = padded.gather(2, best[:, None].expand(rows, size, k)).reshape(rows, size * k)
    found, place = torch.topk(members, k, dim=1, sorted=False)
    # A padding entry is only chosen from a row of infinities; any column will do for it.
    column = (place // k * groups + best.gather(1, place % k)).clamp_(max=columns - 1)
    return found, column


def global_cutoff(values: torch.Tensor, k: int, world: World) -> torch.Tensor:
    """The k-th largest of all ranks' values, a scalar; −inf if there are fewer than k. Every rank must call it."""
    found, _ = _candidates(values, k)
    return torch.topk(world.all_gather(found).flatten(), k).values[-1]


def global_top(values: torch.Tensor, k: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """(places in the flattened values, whether chosen), both [k]: exactly k are chosen over all ranks.

    Ties at the cut-off go to the lower ranks. Every rank must call it.
    """
    found, places = _candidates(values, k)
    everyone = world.all_gather(found)
    cutoff = torch.topk(everyone.flatten(), k).values[-1]
    tied = everyone == cutoff
    room = k - (everyone > cutoff).sum()
    chosen = (everyone > cutoff) | (tied & (tied.flatten().cumsum(0).view_as(tied) <= room))
    return places, chosen[world.rank] & (found > -math.inf)


def _candidates(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's k largest values and their places, filled up with −inf so that all ranks send the same shape."""
    found, places = top_entries(values.detach().reshape(1, -1), k)
    missing = k - found.shape[1]
    return F.pad(found[0], (0, missing), value=-math.inf), F.pad(places[0], (0, missing))
