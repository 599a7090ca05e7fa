"""How logits become the scores that are ranked, thresholded and exported: part of the method (Method.score).

Legend: B rows, L classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_RELIEF = 0.5  # of 0 to 1, chosen on validation images (docs/results.md, appendix)


@dataclass(frozen=True)
class Score:
    """Scores [B, L, …] in [0, 1] of logits [B, L, …]; the dimensions after the classes are a score map's."""

    name: str  # in labels.json
    formula: str  # for people
    per_class: bool  # whether a score is the probability of its class alone, so that ½ means as likely as not
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`bias` [L] is the head's: what the model says of any image."""
        return self.function(logits, bias.view(-1, *[1] * (logits.ndim - 2)))

    @property
    def rule(self) -> str:
        """How thresholds are meant."""
        return f"predict a class where {self.formula} >= threshold; null: never"


def _alone(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits)


def _over_classes(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, 1)


def _beside_the_others(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Evidence for many classes at once raises every logit of a model that was shown one of them: part of it goes."""
    return torch.sigmoid(logits - _RELIEF * torch.logsumexp(logits - bias, 1, keepdim=True))


SIGMOID = Score("sigmoid", "sigmoid(logit)", per_class=True, function=_alone)
SOFTMAX = Score("softmax", "softmax(logits over classes)", per_class=False, function=_over_classes)
RELATIVE = Score("relative", f"sigmoid(logit - {_RELIEF} * logsumexp(logits - head's bias, over classes))",
                 per_class=False, function=_beside_the_others)
SCORES = {score.name: score for score in (SIGMOID, SOFTMAX, RELATIVE)}
