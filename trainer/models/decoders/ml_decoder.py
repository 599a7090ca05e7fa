"""ML-Decoder (Ridnik et al., 2021): fixed random queries, each for a group of classes.

The queries attend to the projected cells once; what a query gathered is turned into the logits of its group's classes
by a linear layer of its own. With a query for every class a group is one class. timm has the same head, which today's
torch refuses to run as a whole (and which keeps its attention to itself); ours is tested against its parts.
Legend: B batch, D width of the feature map, W width of the queries, L classes, N queries, F classes of a group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lacuna.trainer.config.sections import DecoderConfig
from lacuna.trainer.models.decoders.base import Decoder, Layer, check_width

_HEADS, _WIDTH, _FEEDFORWARD, _GROUPS = 8, 768, 2048, 100  # published


class MLDecoder(Decoder):
    def __init__(self, config: DecoderConfig, width: int, classes: int):
        super().__init__()
        heads, self.width = config.heads or _HEADS, config.width or _WIDTH
        check_width(self.width, heads, "ml_decoder")
        queries = min(config.groups or _GROUPS, classes)
        self.project = nn.Linear(width, self.width)
        self.first_norm, self.dropout = nn.LayerNorm(self.width), nn.Dropout(config.dropout)
        self.decoder = Layer(self.width, heads, config.feedforward or _FEEDFORWARD, config.dropout)
        self.register_buffer("queries", torch.randn(queries, self.width))
        self.weight = nn.Parameter(torch.empty(queries, self.width, -(-classes // queries)))
        nn.init.xavier_normal_(self.weight)
        self.bias = nn.Parameter(torch.zeros(classes))

    def gathered(self, features: torch.Tensor, with_attention: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        cells = F.relu(self.project(features.flatten(2).transpose(1, 2)))
        queries = self.queries.to(cells).expand(cells.shape[0], -1, -1)
        asking = self.first_norm(queries + self.dropout(queries))
        return self.decoder(asking, asking, cells, cells, with_attention)

    def classify(self, found: torch.Tensor) -> torch.Tensor:
        grouped = torch.einsum("bnw,nwf->bnf", found, self.weight).flatten(1)
        return (grouped[:, : len(self.bias)] + self.bias).float()
