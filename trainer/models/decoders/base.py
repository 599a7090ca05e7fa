"""What all heads with queries share: the contract, the transformer layer, and attention as score maps.

Legend: B batch, D width of the feature map, W width of the queries, L classes, G grid side, N queries, M cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from lacuna.basics.errors import UserError

_LEAST = 1e-6  # of an attention's share of its largest, so that logarithms stay finite


class Decoder(nn.Module):
    """A head over feature maps whose queries gather what belongs to the classes."""

    weight: nn.Parameter  # what turns gathered features into logits
    bias: nn.Parameter  # [L]
    queries: torch.Tensor  # [N, W]
    width: int  # W
    draws: ClassVar[bool] = False  # its features of a class are what a draw of the logit needs (variational.py)

    @property
    def of_classes(self) -> bool:
        """Whether every class has a query of its own, hence a score map and a feature vector."""
        return len(self.queries) == len(self.bias)

    def gathered(self, features: torch.Tensor, with_attention: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the queries gathered [B, N, W] of features [B, D, G, G], and where [B, N, M] (mean over the heads of the
        last layer; None unless asked)."""
        raise NotImplementedError

    def classify(self, found: torch.Tensor) -> torch.Tensor:
        """Float32 logits [B, L] of what was gathered [B, N, W]."""
        raise NotImplementedError

    def forward(self, features: torch.Tensor, with_maps: bool) -> tuple[torch.Tensor, torch.Tensor | None,
                                                                        torch.Tensor]:
        """logits [B, L], score-map logits [B, L, G, G] (None unless asked), and what was gathered [B, N, W]."""
        found, attention = self.gathered(features, with_maps and self.of_classes)
        logits = self.classify(found)
        return logits, self.maps(logits, attention, features), found

    def maps(self, logits: torch.Tensor, attention: torch.Tensor | None,
             features: torch.Tensor) -> torch.Tensor | None:
        """Score-map logits [B, L, G, G] from attention [B, L, M]."""
        return None if attention is None else spread(logits, attention.float()).unflatten(2, features.shape[2:])


class Layer(nn.Module):
    """Attention and two linear layers, each added to what came in and normalised after."""

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float,
                 activation: Callable[[torch.Tensor], torch.Tensor] = F.relu):
        super().__init__()
        self.activation = activation
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.widen, self.narrow = nn.Linear(width, feedforward), nn.Linear(feedforward, width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, target: torch.Tensor, asking: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
                with_attention: bool = False,
                ignored: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """target and asking [B, N, W], keys and values [B, M, W]; ignored bool [B, M]: cells not to attend to."""
        found, attention = self.attention(asking, keys, values, ignored, need_weights=with_attention)
        target = self.attention_norm(target + self.dropout(found))
        inner = self.narrow(self.dropout(self.activation(self.widen(target))))
        return self.norm(target + self.dropout(inner)), attention


def spread(logits: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """[B, L, M]: logit(σ(z)·a/max a). The cell that is attended to most has the class's own score, the others theirs in
    proportion to their attention."""
    share = attention / attention.amax(2, keepdim=True)
    there, not_there = F.logsigmoid(logits)[:, :, None], F.logsigmoid(-logits)[:, :, None]
    absent = torch.logaddexp(not_there.expand_as(share), there + (1 - share).clamp(min=_LEAST).log())
    return there + share.clamp(min=_LEAST).log() - absent


def check_width(width: int, heads: int, head: str) -> None:
    if width % heads:
        raise UserError(f"model.decoder.heads = {heads} does not divide the width {width} of model.head = {head!r}. "
                        "Choose another number, or model.decoder.width.")
