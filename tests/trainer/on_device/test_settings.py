"""The config's switches reach PyTorch on a GPU, and only there."""

from __future__ import annotations

import torch

from lacuna.trainer.config.sections import TrainConfig
from lacuna.trainer.on_device import settings


def switches() -> tuple[bool, bool, bool]:
    return (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)


def test_switches():
    before = switches()
    try:
        settings.apply(TrainConfig(tf32=not before[0], cudnn_benchmark=not before[2]), torch.device("cpu"))
        assert switches() == before
        for tf32, benchmark in ((True, False), (False, True)):
            settings.apply(TrainConfig(tf32=tf32, cudnn_benchmark=benchmark), torch.device("cuda"))
            assert switches() == (tf32, tf32, benchmark)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
        torch.backends.cudnn.benchmark = before[2]
