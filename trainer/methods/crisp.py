"""CRISP: class priors estimated from scores, and a risk that uses them; Liu et al. (arXiv 2309.13886).

Priors, before every epoch after the warm-up, per class j: S_j are the images annotated with j, n_j = |S_j|, q(z) and
q_p(z) the shares of all n images and of S_j with score ≥ z. At the z that minimises
    q(z)/q_p(z) + (1 + τ)/q_p(z) · (√(ln(4/δ)/2n) + √(ln(4/δ)/2n_j))
the prior is π_j = q(z)/q_p(z), at most 1. A class without annotated images has prior 0.
Risk, with the absolute loss: (1/L)·Σ_j { 2π_j·mean over S_j of (1 − p_j) + |mean of p_j − π_j| }, from the global batch
(the paper sums over classes; the factor 1/L keeps the scale of the warm-up, which is AN).
"""

from __future__ import annotations

import logging
import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import (
    EpochStart,
    LossTerms,
    Method,
    Needs,
    Outputs,
    Settings,
    Step,
    negative,
    positive,
)
from lacuna.trainer.methods.cole import log_loss
from lacuna.trainer.on_device.uploads import to_device

log = logging.getLogger("lacuna")
_IMPLAUSIBLE = 0.5  # mean prior: half of all labels positive
_REACH = 16.0  # logits beyond ±16 share the outermost bins


class CrispSettings(Settings):
    warmup_epochs: int = Field(1, ge=1)
    """Epochs of AN at the run's start (the paper does not say how many). Priors of a classifier that cannot rank yet
    are near 1, and everything positive is then the risk's minimum: from scratch, warm up until AN ranks."""
    every: int = Field(1, ge=1)
    """Epochs between two estimates of the priors (published: 1; with 3 the authors lose 0.5 to 2.2 mAP)."""
    delta: float = Field(0.01, gt=0, lt=1)
    """δ of the bound."""
    tau: float = Field(0.01, ge=0)
    """τ of the bound."""
    bins: int = Field(1024, ge=2)
    """Scores are counted in so many equal bins of logits in ±16: the search is exact for the binned scores."""
    positive_mean: Literal["data", "batch"] = "data"
    """Mean over S_j in a mini-batch. data: n/(n_j·B) times the sum over its annotated images, the unbiased estimate of
    the published risk; batch: the mean over those in the batch, where a rare class counts as much as a frequent one and
    most often has none (COCO features, batch 16: 42 mAP instead of 50)."""


class Crisp(Method[CrispSettings]):
    """Priors and risk; a verified negative adds its absolute loss p/L.

    Not here: the final logit bias λ·b_j of the paper's last equations, whose values cannot be recovered from it.
    """

    paper = "Liu et al., Can Class-Priors Help Single-Positive Multi-Label Learning?, arXiv 2023"
    class_state: ClassVar = {"priors": "float32 [L]"}
    priors: torch.Tensor | None = None  # float32 [L]; None: warm-up

    def needs(self) -> Needs:
        return Needs(whole_batch=True, scored_pass=True)

    def begin_epoch(self, start: EpochStart) -> None:
        settings = self.settings
        late = start.overall - settings.warmup_epochs
        if late < 0 or (late % settings.every and self.priors is not None):
            return
        counts = torch.zeros((2, self.task.classes, settings.bins), dtype=torch.int64, device=start.world.device)
        for scored in start.scored():
            bins = score_bins(scored.outputs.logits, settings.bins)
            counts[0] += binned_counts(bins, torch.ones_like(bins, dtype=torch.bool), settings.bins)
            counts[1] += binned_counts(bins, positive(scored.batch.labels), settings.bins)
        everyone = start.world.global_sum(counts)
        self.priors = estimated_priors(everyone[0], everyone[1], settings.delta, settings.tau).cpu()
        if start.world.main and float(self.priors.mean()) > _IMPLAUSIBLE:
            log.warning("crisp: the estimated class priors average %.2f. The classifier does not rank well enough yet, "
                        "and the risk may make everything positive: raise method.warmup_epochs", self.priors.mean())

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        is_positive = positive(batch.labels)
        if self.priors is None:
            as_positive, as_negative = log_loss(outputs.logits)
            return LossTerms(torch.where(is_positive, as_positive, as_negative).mean(1))
        p = torch.sigmoid(outputs.logits)
        self.priors = to_device(self.priors, p.device)  # they stay there
        priors = self.priors.to(p.dtype)
        annotated = is_positive.to(p.dtype)
        sums = step.world.global_sum(torch.stack([(annotated * (1 - p)).sum(0), p.sum(0), annotated.sum(0).detach()]))
        missed = sums[0] / self._annotated(sums[2].detach(), step)
        risk = 2 * priors * missed + (sums[1] / step.samples - priors).abs()
        return LossTerms(torch.where(negative(batch.labels), p, 0.0).mean(1), risk.mean())

    def _annotated(self, in_batch: torch.Tensor, step: Step) -> torch.Tensor:
        """What the sum over S_j is divided by, [L]."""
        if self.settings.positive_mean == "batch":
            return in_batch.clamp(min=1)
        share = to_device(self.task.positives / max(1, self.task.samples), in_batch.device, in_batch.dtype)
        return (share * step.samples).clamp(min=1e-12)

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.priors is None else {"priors": self.priors}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.priors = state.get("priors")


def score_bins(logits: torch.Tensor, bins: int) -> torch.Tensor:
    """int64 [B, L]."""
    return ((logits.float() + _REACH) * (bins / (2 * _REACH))).long().clamp(0, bins - 1)


def binned_counts(bins: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
    """int64 [L, size]: how many entries of each class that are counted lie in each bin."""
    classes = bins.shape[1]
    place = bins + torch.arange(classes, device=bins.device) * size
    return torch.bincount(place[counted], minlength=classes * size).view(classes, size)


def estimated_priors(every: torch.Tensor, annotated: torch.Tensor, delta: float, tau: float) -> torch.Tensor:
    """float32 [L] from counts [L, bins] of all images and of the annotated ones; bins by ascending score."""
    above, above_annotated = (c.flip(1).cumsum(1).double() for c in (every, annotated))
    n, of_class = above[:, -1:].clamp(min=1), above_annotated[:, -1:].clamp(min=1)
    share, share_annotated = above / n, above_annotated / of_class
    slack = (1 + tau) * math.sqrt(math.log(4 / delta) / 2) * (n.rsqrt() + of_class.rsqrt())
    ratio = share / share_annotated
    bound = torch.where(above_annotated > 0, ratio + slack / share_annotated, math.inf)
    best = bound.argmin(1, keepdim=True)
    found = torch.where(above_annotated[:, -1:] > 0, ratio.gather(1, best), 0.0)
    return found.clamp(max=1).squeeze(1).float()
