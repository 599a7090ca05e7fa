"""CSL: the partial asymmetric loss (P-ASL) and its selective treatment of unknown labels, Ben-Baruch et al. (2022).

Reduction: **sum** over classes and the global batch, as published. The loop takes a mean over samples, so each
sample's sum is multiplied by the number of samples; learning rates of 2e-4 with Adam are tuned for that.
Entries: positives −α⁺(1 − p)^γ⁺ ln p; negatives and unknown ones −α(1 − q)^γ ln q with q = min(1 − p + clip, 1);
logarithms of max(·, 1e-8); the focal weights have no gradient. ω weighs entries by `mode`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator

from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.methods.base import LossTerms, Method, Needs, Outputs, Settings, Step, Task, positive, unknown
from lacuna.trainer.methods.known_gradient import WithGradient, cached_blocks, numbers
from lacuna.trainer.methods.top_entries import global_top, top_entries
from lacuna.trainer.on_device.uploads import to_device
from lacuna.trainer.priors import read_prior

_FLOOR = 1e-8
_FAR_BELOW = -3e38  # ranks known entries under every unknown one; finite, because 0 · inf is NaN


class CslSettings(Settings):
    """Defaults are the released code's; OpenImages in the paper: γ 1, 2, 7, top 200, η 0.05; LVIS: γ 0, 0, 1."""

    mode: Literal["ignore", "negative", "ignore_normalized", "selective"] = "selective"
    """Unknown entries: ignore; negative: count as negatives; ignore_normalized: ignored, and an image's annotated
    entries weigh 1 + 1/(1 + annotated); selective: negatives, except likely ones and classes with a high prior."""
    gamma_positive: float = Field(0.0, ge=0)
    """γ⁺ (OpenImages 1)."""
    gamma_negative: float = Field(1.0, ge=0)
    """γ⁻ (OpenImages 2, COCO FPC 3, COCO RPS 1)."""
    gamma_unknown: float = Field(2.0, ge=0)
    """γᵘ (OpenImages 7, COCO 4)."""
    alpha_positive: float = Field(1.0, ge=0)
    """α⁺, weight of positives."""
    alpha_negative: float = Field(1.0, ge=0)
    """α⁻, weight of verified negatives."""
    alpha_unknown: float = Field(1.0, ge=0)
    """αᵘ, weight of unknown entries."""
    clip: float = Field(0.0, ge=0, lt=1)
    """Added to 1 − p of entries that are not positive: those with p below it have no loss."""
    top: int = Field(5, ge=0)
    """K: how many of the likeliest unknown entries are ignored (OpenImages 200)."""
    budget: Literal["per_image", "batch"] = "per_image"
    """per_image: K of each image (the paper); batch: K·B of the global batch, wherever they are (the released code)."""
    prior: str | None = None
    """File of class priors, .csv or .json: a class's mean probability under a model that was trained with `ignore`.
    Without it, selective goes by likelihood alone."""
    prior_threshold: float = Field(0.05, ge=0, le=1)
    """η: unknown entries of classes with a higher prior are ignored; 0 = off (COCO with the authors' prior: 0.5)."""
    soft_prior: float = Field(0.0, ge=0)
    """α of the soft alternative: unknown entries weigh exp(−α·prior) instead of η's 0 or 1; 0 = off (published: 10)."""

    @model_validator(mode="after")
    def _prior_is_used(self) -> CslSettings:
        if self.soft_prior and self.prior is None:
            raise ValueError("soft_prior needs a file of class priors in `prior`")
        if self.prior is not None and self.mode != "selective":
            raise ValueError(f"a prior has no effect in mode {self.mode!r}; use mode 'selective' or leave it out")
        return self


class Csl(Method[CslSettings]):
    """P-ASL: focal losses with exponents of their own for positives, negatives and unknown entries. In `selective`
    mode unknown entries are negatives, unless this image's prediction or the class's prior says that they may not be.
    """

    paper = ("Ben-Baruch et al., Multi-label Classification with Partial Annotations using Class-aware Selective "
             "Loss, CVPR 2022")
    settings: CslSettings

    def __init__(self, settings: CslSettings, task: Task):
        super().__init__(settings, task)
        self.prior: torch.Tensor | None = None
        if settings.prior is not None:
            prior = read_prior(settings.prior, task.classes, task.class_names, task.class_ids)
            self.prior = torch.from_numpy(prior).float()

    def needs(self) -> Needs:
        """Only the released code's budget looks across images."""
        return Needs(whole_batch=self.over_the_batch)

    @property
    def over_the_batch(self) -> bool:
        return self.settings.mode == "selective" and self.settings.budget == "batch"

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.prior is None else {"prior": self.prior}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """The prior that the run began with, whatever happened to its file since."""
        self.prior = state.get("prior")

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        logits, labels = outputs.logits, batch.labels
        with torch.no_grad():
            kept = self._kept_of_batch(logits, labels, step) if self.over_the_batch else None
            per_sample, gradient = torch.empty_like(logits[:, 0]), torch.empty_like(logits)
            for rows in cached_blocks(logits):
                per_sample[rows] = self._rows_loss(logits[rows], labels[rows], None if kept is None else kept[rows],
                                                   gradient[rows])
        return LossTerms(WithGradient.apply(logits, per_sample, gradient) * step.samples)

    def _rows_loss(self, logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None,
                   gradient: torch.Tensor) -> torch.Tensor:
        """Loss [rows]; fills in its gradient [rows, L]."""
        s = self.settings
        positives, unknowns = numbers(positive(labels), logits), numbers(unknown(labels), logits)
        known = 1 - unknowns
        weights = self._expose(unknowns, logits, known) if kept is None else self._expose_prior(unknowns).mul_(kept)
        miss, entries, slopes = label_losses(logits, positives, s.clip)
        if s.mode == "ignore_normalized":
            more = 1 + 1 / (1 + known.sum(1, keepdim=True))
            known, positives = known * more, positives * more
        weights.mul_(_power(miss, s.gamma_unknown))
        if s.alpha_unknown != 1:
            weights *= s.alpha_unknown
        weights.addcmul_(positives, _power(miss, s.gamma_positive), value=s.alpha_positive)
        weights.addcmul_(known.sub_(positives), _power(miss, s.gamma_negative), value=s.alpha_negative)
        torch.mul(slopes, weights, out=gradient)
        return entries.mul_(weights).sum(1)

    def _expose(self, unknowns: torch.Tensor, logits: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """ω of unknown entries, 0 elsewhere; made of their 0/1 mask in place."""
        s = self.settings
        if s.mode in ("ignore", "ignore_normalized"):
            return unknowns.zero_()
        if s.mode == "negative":
            return unknowns
        exposure = self._expose_prior(unknowns)
        if s.top:
            # Logits rank like probabilities, without the ties of saturated ones. Entries that the prior ignores
            # already are ranked and use up the budget all the same, as in the released code.
            exposure.scatter_(1, top_entries(torch.add(logits, known, alpha=_FAR_BELOW), s.top)[1], 0.0)
        return exposure

    def _expose_prior(self, exposure: torch.Tensor) -> torch.Tensor:
        if self.prior is None:
            return exposure
        self.prior = to_device(self.prior, exposure.device)  # it stays there
        prior = self.prior.to(exposure.dtype)
        if self.settings.soft_prior:
            return exposure.mul_(torch.exp(-self.settings.soft_prior * prior))
        return exposure.mul_(prior <= self.settings.prior_threshold) if self.settings.prior_threshold else exposure

    def _kept_of_batch(self, logits: torch.Tensor, labels: torch.Tensor, step: Step) -> torch.Tensor:
        """[B, L]: 0 for the K·B likeliest unknown entries of the global batch, else 1."""
        kept = torch.ones_like(logits)
        count = min(self.settings.top, self.task.classes) * step.samples
        if count:
            likelihood = torch.add(logits, 1 - numbers(unknown(labels), logits), alpha=_FAR_BELOW)
            places, chosen = global_top(likelihood, count, step.world)
            if len(kept):  # a minimum: places that were not chosen are left alone, without a host sync
                kept.view(-1).scatter_reduce_(0, places, (~chosen).to(kept.dtype), "amin")
        return kept


def label_losses(logits: torch.Tensor, positives: torch.Tensor, clip: float) -> tuple[torch.Tensor, ...]:
    """(1 − label's probability, −ln of it, and the latter's derivative by the logit), each [B, L], without graph.

    Arithmetic with 0/1 masks, in place: on a CPU it takes a fifth of the time of `torch.where`.
    """
    wrong = torch.addcmul(logits, positives, logits, value=-2.0)  # −a of positives, a of the others
    miss = torch.sigmoid(wrong)
    cap = -math.log(_FLOOR)
    entries = F.softplus(wrong).clamp_(max=cap)
    slopes = (cap - entries).sign_().mul_(miss)  # below the floor the gradient is 0, as with the authors' clamp
    if clip:
        others = 1 - positives
        clipped = F.relu(miss - clip)
        right = (1 - clipped).clamp_(min=_FLOOR)  # q
        of_others = miss * torch.sigmoid(-wrong) / right * clipped.sign()
        slopes = slopes * positives + of_others * others
        entries = entries * positives - torch.log1p(-clipped.clamp(max=1 - _FLOOR)) * others
        miss = miss * positives + clipped * others
    return miss, entries, slopes.addcmul_(positives, slopes, value=-2.0)


def _power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """base ** exponent; the usual whole exponents by multiplication, which is much faster than `pow`."""
    if exponent == 0:
        return torch.ones_like(base)
    if exponent != int(exponent) or exponent > 16:
        return base**exponent
    if exponent == 1:
        return base
    half = _power(base, exponent // 2)
    return (half * half).mul_(base) if exponent % 2 else half * half
