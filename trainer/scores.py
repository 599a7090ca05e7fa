"""How logits become the scores that are ranked, thresholded and exported: part of the method (Method.score).

Legend: B rows, L classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Score:
    """Scores [B, L, …] in [0, 1] of logits [B, L, …]; the dimensions after the classes are a score map's."""

    name: str  # in labels.json
    formula: str  # for people
    per_class: bool  # whether a score is the probability of its class alone, so that ½ means as likely as not
    function: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.function(logits)

    @property
    def rule(self) -> str:
        """How thresholds are meant."""
        return f"predict a class where {self.formula} >= threshold; null: never"


def _over_classes(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, 1)


SIGMOID = Score("sigmoid", "sigmoid(logit)", per_class=True, function=torch.sigmoid)
SOFTMAX = Score("softmax", "softmax(logits over classes)", per_class=False, function=_over_classes)
SCORES = {score.name: score for score in (SIGMOID, SOFTMAX)}
