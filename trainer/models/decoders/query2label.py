"""Query2Label (Liu et al., 2021): a transformer with one learnt query per class.

An encoder layer over the cells, then decoder layers in which every class's query attends to the cells; positions are
sines and cosines of row and column, added to keys alone. A class's logit is the product of what its query gathered with
weights of its own. As in the released code, decoder layers have no attention between the queries.
Legend: B batch, D width of the feature map, W width of the queries, L classes, G grid side.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.trainer.config.sections import DecoderConfig
from lacuna.trainer.models.decoders.base import Decoder, Layer, check_width

_HEADS, _LAYERS, _TIMES = 4, 2, 4  # published: 4 heads, 2 decoder layers, 8,192 inner units at a width of 2,048
_BASE = 10_000.0


class Query2Label(Decoder):
    name = "query2label"

    def __init__(self, config: DecoderConfig, width: int, classes: int):
        super().__init__()
        heads, self.width = config.heads or _HEADS, config.width or width
        check_width(self.width, heads, self.name)
        if self.width % 4:
            raise UserError(f"model.head = {self.name!r} has sines and cosines of two directions, so that its width, "
                            f"here {self.width}, must be divisible by 4. Set model.decoder.width.")
        self.project = nn.Linear(width, self.width) if self.width != width else nn.Identity()
        settings = self.width, heads, config.feedforward or _TIMES * self.width, config.dropout
        self.encoder = nn.ModuleList(Layer(*settings) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(Layer(*settings) for _ in range(config.layers or _LAYERS))
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.norm = nn.LayerNorm(self.width)
        self.queries = nn.Parameter(torch.randn(classes, self.width))
        most = 1 / math.sqrt(self.width)
        self.weight = nn.Parameter(torch.empty(classes, self.width).uniform_(-most, most))
        self.bias = nn.Parameter(torch.empty(classes).uniform_(-most, most))

    def gathered(self, features: torch.Tensor, with_attention: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        cells = self.project(features.flatten(2).transpose(1, 2))
        places = positions(features.shape[2], self.width, cells.device).to(cells.dtype)
        for layer in self.encoder:
            cells, _ = layer(cells, cells + places, cells + places, cells)
        found, attention = torch.zeros_like(self.queries).expand(cells.shape[0], -1, -1), None
        for number, layer in enumerate(self.decoder, 1):
            found, attention = layer(found, found + self.queries, cells + places, cells,
                                     with_attention and number == len(self.decoder))
        return self.norm(found), attention

    def classify(self, found: torch.Tensor) -> torch.Tensor:
        return ((found * self.weight).sum(2) + self.bias).float()


def positions(side: int, width: int, device: torch.device) -> torch.Tensor:
    """[G², W]: sines and cosines of the row, then of the column, each with W/4 wavelengths; the last one is 2π."""
    steps = torch.arange(1, side + 1, dtype=torch.float32, device=device) / (side + 1e-6) * 2 * math.pi
    waves = _BASE ** (2 * torch.arange(width // 4, dtype=torch.float32, device=device) / (width // 2))
    turns = steps[:, None] / waves
    along = torch.stack([turns.sin(), turns.cos()], 2).flatten(1)  # [G, W/2]
    rows, columns = along[:, None].expand(-1, side, -1), along[None].expand(side, -1, -1)
    return torch.cat([rows, columns], 2).flatten(0, 1)
