"""`selection`: the likelihood of how partial labels arise (likelihood.py); ours, no paper.

Reduction: −ln P / L, a **mean** over classes and over the global batch, as binary cross entropy: with the sum's λ, the
head's coupled weight decay is λ / L.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Outputs, Settings, Step, Task, expected_positives
from lacuna.trainer.methods.cole import weak_negatives
from lacuna.trainer.methods.selection.likelihood import fixed, independent
from lacuna.trainer.scores import RELATIVE, SIGMOID, Score

Share = Annotated[float, Field(gt=0, lt=1)]


class SelectionSettings(Settings):
    shown: Literal["fixed", "independent"] = "fixed"
    """fixed: an annotator shows a given number of positives, whatever their number (one positive per image; "name up to
    three"). independent: every positive is shown with probability q on its own (a share of all labels is known; a quota
    per class). To tell: do images with more objects have more shown positives? Then independent."""
    q: Share | list[Share] | Literal["estimated"] | None = None
    """How likely a positive is shown, with `shown: independent`: a number, one per class, or `estimated` (the default):
    shown positives per image ÷ model.expected_positives."""
    start_phase: int = Field(0, ge=0)
    """Phase (from 0) in which the likelihood begins; before it the loss is WAN's. For a network that learns from
    scratch: as long as it cannot tell images apart, "everything is present" is likelier than the truth, since an image
    without positives could not have shown one."""
    ranking: Literal["beside", "alone"] = "beside"
    """How images are ranked with `shown: fixed`. beside: evidence for a class counts beside that for the image's other
    classes, which is better where a head learns on a fixed or pretrained backbone; alone: by the class's own
    probability, better where the network learns from scratch (the demo: 92 against 86 validation mAP)."""

    @model_validator(mode="after")
    def _q_is_used(self) -> SelectionSettings:
        if self.shown == "fixed" and self.q is not None:
            raise ValueError("q has no effect with shown: fixed; set shown: independent, or leave it out")
        return self


class Selection(Method[SelectionSettings]):
    """Maximum likelihood under a model of how labels come to be shown: unknown entries are neither negatives nor
    ignored, but hidden with the probability that the model and the way of annotation give them. The gradient is
    p − E[y | shown labels]. Its Σp comes out too high on fixed features: it ranks, it does not count. With `shown:
    fixed` and `ranking: beside` images are ranked by the logit less half of the logsumexp of all logits (without the
    head's bias): evidence for many classes raises all of them."""

    paper = "ours; the derivation is in trainer/methods/selection"

    def __init__(self, settings: SelectionSettings, task: Task):
        super().__init__(settings, task)
        self.start_phase = settings.start_phase
        self.q = _share(settings, task) if settings.shown == "independent" else None

    @classmethod
    def score_with(cls, settings: dict) -> Score:
        alone = settings.get("shown") == "independent" or settings.get("ranking") == "alone"
        return SIGMOID if alone else RELATIVE

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.q is None else {"q": self.q}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """The q that the run began with, whatever happened to the images it was estimated from."""
        self.q = state.get("q")

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        logits, labels = outputs.logits, batch.labels
        if step.phase < self.start_phase:
            return LossTerms(weak_negatives(logits, labels))
        if self.q is None:
            return LossTerms(fixed(logits, labels).loss(logits))
        self.q = self.q.to(logits.device)  # once
        return LossTerms(independent(logits, labels, self.q).loss(logits))


def _share(settings: SelectionSettings, task: Task) -> torch.Tensor:
    """q, a scalar or [L]."""
    if isinstance(settings.q, list) and len(settings.q) != task.classes:
        raise UserError(f"method.q has {len(settings.q)} numbers, but there are {task.classes} classes. Give one for "
                        "all of them, one per class, or 'estimated'.")
    if isinstance(settings.q, float | list):
        return torch.tensor(settings.q, dtype=torch.float32)
    k = expected_positives(task)
    shown = float(task.positives.sum()) / task.samples
    if not 0 < shown < k:
        raise UserError(f"method.q cannot be estimated: data.train shows {shown:.3g} positives per image, of {k:.3g} "
                        "expected ones. Give method.q, a number between 0 and 1, or a larger "
                        "model.expected_positives; with full labels use the method 'bce'.")
    return torch.tensor(shown / k, dtype=torch.float32)
