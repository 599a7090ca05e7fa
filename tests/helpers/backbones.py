"""A model around any backbone, and a batch of pictures for it."""

from __future__ import annotations

import torch

from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.models.classifier import Classifier, build_model


def build(backbone: str, size: int = 64, classes: int = 7, **model) -> Classifier:
    data = DataConfig.model_validate({"train": {"url": "unused"}, "image_size": size, "normalize": "unit"})
    return build_model(ModelConfig(backbone=backbone, **model), data, classes, 0).eval()


def pictures(size: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
