"""SCPNet-style self-consistency of two views with thresholds per class, after Ding et al. (CVPR 2023).

Reduction: **sum** over classes and the global batch, as published (see hill.py). SPLC on the first view, plus λ times
the exact binary cross-entropy of the strong view to hard targets: of the first view's k highest classes those with
p ≥ b·a_c/(2 − a_c), and the annotated positives; an image in which none of the k passes is left out.
a_c = max(count_c / max(largest count, k·N − Σ counts), 1/L), where count_c counts the samples whose last hard targets
have class c. With a relation R of the classes, the strong view follows R·p too, with weight λ·κ, in the same images.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from lacuna.data_pipelines.batch import Batch
from lacuna.state_store import Field as StateField
from lacuna.trainer.methods.base import LossTerms, Needs, Outputs, Step, Task, positive, unknown
from lacuna.trainer.methods.hill import Splc, SplcSettings
from lacuna.trainer.on_device.uploads import to_device
from lacuna.trainer.relations import read_relation


class ScpnetSettings(SplcSettings):
    consistency: float = Field(0.125, ge=0)
    """λ of the consistency term."""
    hard_k: int = Field(2, ge=1)
    """k: classes of an image that can be pseudo-labels (VOC 5, COCO 2, NUS 6, CUB 31)."""
    base_threshold: float = Field(0.95, gt=0, le=1)
    """b, the threshold of a class that is found as often as any."""
    relation: str | None = None
    """R: what `lacuna relation` made, or a .npy file (fsspec URL) of [L, L] numbers in class order whose rows sum to 1.
    The authors make it from CLIP's text features (`lacuna relation text`)."""
    relation_weight: float = Field(1.0, ge=0)
    """κ (COCO and NUS 1, VOC 2, CUB 3)."""


class Scpnet(Splc):
    """SPLC and self-consistency with class-wise thresholds, on the ordinary head.

    State: one bit per class, the sample's last hard targets; class counts are kept up to date with them. Not here, so
    the published numbers do not apply: CLIP's image encoder and prompts, and the graph network over the classes'
    relations. SPLC and the pseudo-labels see the same view (published: two draws of it). A verified negative is never a
    target.
    """

    paper = ("Ding et al., Exploring Structured Semantic Prior for Multi-Label Recognition with Incomplete Labels, "
             "CVPR 2023")
    settings_type = ScpnetSettings
    settings: ScpnetSettings
    class_state: ClassVar = {"counts": "int64 [L]"}

    def __init__(self, settings: ScpnetSettings, task: Task):
        super().__init__(settings, task)
        self.counts = torch.zeros(task.classes, dtype=torch.int64)
        self.relation = None if settings.relation is None else read_relation(
            settings.relation, task.classes, task.class_names)

    def needs(self) -> Needs:
        return Needs(strong_view=True, whole_batch=True)

    def fields(self) -> list[StateField]:
        return [StateField("selected", (self.task.classes,), "bits")]

    def thresholds(self) -> torch.Tensor:
        """float32 [L]."""
        settings = self.settings
        rest = settings.hard_k * self.task.samples - self.counts.sum()
        rate = self.counts.float() / torch.maximum(self.counts.max(), rest).clamp(min=1)
        rate = rate.clamp(min=1 / self.task.classes)
        return settings.base_threshold * rate / (2 - rate)

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        settings = self.settings
        strong = step.forward(batch.strong_view).logits
        p = torch.sigmoid(outputs.logits.detach())
        highest = torch.zeros_like(p, dtype=torch.bool)
        highest.scatter_(1, p.topk(min(settings.hard_k, p.shape[1]), dim=1).indices, True)
        self.counts = to_device(self.counts, p.device)  # they stay there
        passed = highest & (p >= self.thresholds()) & (unknown(batch.labels) | positive(batch.labels))
        used = passed.any(1)
        hard = passed | positive(batch.labels)
        differs = F.binary_cross_entropy_with_logits(strong, hard.to(strong.dtype), reduction="none").sum(1)
        if self.relation is not None:
            self.relation = to_device(self.relation, p.device, p.dtype)
            follows = F.binary_cross_entropy_with_logits(strong, p @ self.relation.T, reduction="none").sum(1)
            differs = differs + settings.relation_weight * follows
        own = self.entries(outputs.logits, batch.labels, step.epoch).sum(1)
        before = step.state.read("selected")
        after = torch.where(hard.any(1, keepdim=True), hard, before)
        moved = step.world.global_sum(after.sum(0) - before.sum(0))
        self.counts = self.counts + moved
        return LossTerms((own + settings.consistency * torch.where(used, differs, 0.0)) * step.samples,
                         rows={"selected": after})

    def state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.counts = state["counts"]
