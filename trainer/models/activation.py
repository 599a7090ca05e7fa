"""Grad-CAM++ (Chattopadhay et al., WACV 2018): where in a feature map a class was seen, by its score's gradient there.

a = g² / (2g² + g³·Σ cells of the channel's features + 1e-6), 0 where g is; a channel's weight is Σ a·max(g, 0), and the
activation of a cell is the weighted sum of its channels, 0 at least.
Legend: B batch, D channels, G grid side.
"""

from __future__ import annotations

import torch

_LEAST = 1e-6


def grad_cam(features: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """float32 [B, G, G], without gradient, of features [B, D, G, G] and the scores [B] that were made of them."""
    slopes = torch.autograd.grad(scores.sum(), features)[0].float()
    seen = features.detach().float()
    squares = slopes.square()
    below = 2 * squares + squares * slopes * seen.sum((2, 3), keepdim=True) + _LEAST
    shares = torch.where(slopes != 0, squares / below, 0.0)
    weights = (shares * slopes.clamp(min=0)).sum((2, 3), keepdim=True)
    return (weights * seen).sum(1).clamp(min=0)
