"""MIME's head (Liu et al., ICML 2023): Query2Label, whose classes are seen through a Gaussian bottleneck.

What a class's query gathered becomes a Gaussian of Z numbers by two linear layers with a ReLU between them: means μ and
spreads σ = exp(s/2), s/2 kept within ±6. A class's logit is w·z + b with weights of its own, z being drawn. Here it is
w·μ + b, without a draw, and the method that draws gets what it needs of every class:
    spread       ‖w·σ‖, how far one draw of z moves the logit
    information  mean over Z of −½(1 + 2 ln σ − μ² − σ²), the bottleneck's divergence from N(0, 1)
w·z of a draw z is a Gaussian number with mean w·μ and this spread, so nobody has to draw Z numbers for one logit.
Legend: B batch, D width of the feature map, W width of the queries, L classes, Z numbers of the bottleneck.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lacuna.trainer.config.sections import DecoderConfig
from lacuna.trainer.models.decoders.query2label import Query2Label

_LATENT, _MOST = 256, 6.0  # published


class Variational(Query2Label):
    name, draws = "variational", True

    def __init__(self, config: DecoderConfig, width: int, classes: int):
        super().__init__(config, width, classes)
        latent = config.latent or _LATENT
        self.bottleneck = nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(),
                                        nn.Linear(self.width, 2 * latent))
        most = 1 / math.sqrt(latent)
        self.weight = nn.Parameter(torch.empty(classes, latent).uniform_(-most, most))
        nn.init.uniform_(self.bias, -most, most)

    def forward(self, features: torch.Tensor, with_maps: bool) -> tuple[torch.Tensor, torch.Tensor | None,
                                                                        torch.Tensor]:
        """As of any decoder, with (spread, information) float32 [B, L, 2] instead of what was gathered."""
        found, attention = self.gathered(features, with_maps)
        mean, size = self.bottleneck(found).float().chunk(2, 2)
        log_spread = (size / 2).clamp(-_MOST, _MOST)
        spread = torch.linalg.vector_norm(self.weight.float() * log_spread.exp(), dim=2)
        information = (mean.square() + (2 * log_spread).exp() - 1 - 2 * log_spread).mean(2) / 2
        logits = self.classify(mean)
        return logits, self.maps(logits, attention, features), torch.stack([spread, information], 2)
