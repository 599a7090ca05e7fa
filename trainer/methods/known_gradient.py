"""Losses that bring their own gradient: no graph, computed in blocks of rows that stay in the CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_CACHED_ENTRIES = 1 << 17


def cached_blocks(logits: torch.Tensor, width: int = 0) -> Iterator[slice]:
    """Rows that are computed together: on a CPU as many as stay in its cache with a dozen intermediate results.

    `width`: entries of the widest intermediate result per row, if more than one per class.
    """
    rows, classes = logits.shape
    size = max(1, rows if logits.is_cuda else _CACHED_ENTRIES // max(classes, width))
    return (slice(start, start + size) for start in range(0, rows, size))


class WithGradient(torch.autograd.Function):
    """A value [B] of the logits [B, L] whose gradient is known."""

    @staticmethod
    def forward(ctx, logits, value, gradient):
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return grad[:, None] * gradient, None, None


def numbers(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """0 and 1; by way of int8, because converting booleans is eight times slower."""
    return mask.view(torch.int8).to(like.dtype)
