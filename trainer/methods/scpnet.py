"""SCPNet-style self-consistency of two views with thresholds per class, after Ding et al. (CVPR 2023).

Reduction: **sum** over classes and the global batch, as published (see hill.py). SPLC on the first view, plus λ times
the exact binary cross-entropy of the strong view to hard targets: of the first view's k highest classes those with
p ≥ b·a_c/(2 − a_c), and the annotated positives; an image in which none of the k passes is left out.
a_c = max(count_c / max(largest count, k·N − Σ counts), 1/L), where count_c counts the samples whose last pseudo-labels
have class c.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from data_pipelines.stream import Batch
from state_store import Field as StateField
from trainer.methods.base import LossTerms, Outputs, Settings, Step, Task, positive, unknown
from trainer.methods.hill import Splc, SplcSettings


class ScpnetSettings(SplcSettings):
    consistency: float = Field(0.125, ge=0)
    """λ of the consistency term."""
    hard_k: int = Field(2, ge=1)
    """k: classes of an image that can be pseudo-labels (VOC 5, COCO 2, NUS 6, CUB 31)."""
    base_threshold: float = Field(0.95, gt=0, le=1)
    """b, the threshold of a class that is found as often as any."""


class Scpnet(Splc):
    """SPLC and self-consistency with class-wise thresholds, on the ordinary head.

    State: one bit per class, the sample's last pseudo-labels (rewritten in a visit in which some pass); class counts
    are kept up to date with them. Not here, so the published numbers do not apply: CLIP's image encoder and prompts,
    the graph network over the classes' relations, and the divergence from relation-smoothed predictions. A verified
    negative is never a pseudo-label.
    """

    paper = ("Ding et al., Exploring Structured Semantic Prior for Multi-Label Recognition with Incomplete Labels, "
             "CVPR 2023")
    published: ClassVar = {}
    settings_type: ClassVar[type[Settings]] = ScpnetSettings
    class_state: ClassVar = {"counts": "int64 [L]"}
    needs_strong_view = True
    batch_coupled = True

    def __init__(self, settings: ScpnetSettings, task: Task):
        super().__init__(settings, task)
        self.counts = torch.zeros(task.classes, dtype=torch.int64)

    def fields(self) -> list[StateField]:
        return [StateField("selected", (self.task.classes,), "bits")]

    def thresholds(self) -> torch.Tensor:
        """float32 [L]."""
        settings: ScpnetSettings = self.settings  # type: ignore[assignment]
        rest = settings.hard_k * self.task.samples - int(self.counts.sum())
        rate = self.counts.float() / max(int(self.counts.max()), rest, 1)
        rate = rate.clamp(min=1 / self.task.classes)
        return settings.base_threshold * rate / (2 - rate)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings: ScpnetSettings = self.settings  # type: ignore[assignment]
        assert step.state is not None
        assert step.forward is not None
        assert batch.strong is not None
        strong = step.forward(batch.strong).logits
        p = torch.sigmoid(outputs.logits.detach())
        highest = torch.zeros_like(p, dtype=torch.bool)
        highest.scatter_(1, p.topk(min(settings.hard_k, p.shape[1]), dim=1).indices, True)
        passed = highest & (p >= self.thresholds().to(p.device)) & (unknown(batch.labels) | positive(batch.labels))
        used = passed.any(1)
        target = (passed | positive(batch.labels)).to(strong.dtype)
        differs = F.binary_cross_entropy_with_logits(strong, target, reduction="none").sum(1)
        own = self.entries(outputs.logits, batch.labels, step.epoch).sum(1)
        before = step.state.read("selected")
        after = torch.where(used[:, None], passed, before)
        moved = step.world.global_sum(after.sum(0) - before.sum(0))
        self.counts = self.counts + moved.cpu()
        return LossTerms((own + settings.consistency * torch.where(used, differs, 0.0)) * step.samples,
                         rows={"selected": after})

    def state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.counts = state["counts"]
