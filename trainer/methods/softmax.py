"""`softmax`: cross entropy over the classes, as if an image had one; ranked by its probability.

Reduction: −ln softmax(a) of the shown positives, their mean per image, then the **mean** over the global batch. It is
not divided by the number of classes as binary cross entropy is: the head's weight decay on its scale is λ itself, not
λ / L, and learning rates of plain SGD are about L times smaller.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Outputs, Settings, Step, positive
from lacuna.trainer.scores import SOFTMAX, Score


class Softmax(Method[Settings]):
    """Cross entropy over classes, uniform over an image's shown positives; an image that shows none has no loss. Its
    scores are the softmax's probabilities, which add up to 1 over the classes: they rank, but none of them says how
    likely its class is to be in the image. Verified negatives count as any other class that is not shown."""

    paper = "no paper: the usual loss of single-label classification"
    score: ClassVar[Score] = SOFTMAX

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        return LossTerms(self.complete_loss(outputs.logits, batch.labels))

    def complete_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shown = positive(labels)
        logs = torch.log_softmax(logits, 1)
        return -torch.where(shown, logs, 0.0).sum(1) / shown.sum(1).clamp(min=1)
