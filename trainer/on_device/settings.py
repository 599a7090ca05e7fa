"""Switches of PyTorch that decide how a GPU computes."""

from __future__ import annotations

import torch

from lacuna.trainer.config.sections import TrainConfig


def apply(train: TrainConfig, device: torch.device) -> None:
    """Only on GPUs: the same switches would change what some CPUs do."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = train.tf32
        torch.backends.cudnn.benchmark = train.cudnn_benchmark
