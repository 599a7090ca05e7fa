"""The oracle of everything that scores images: one at a time, with the weights of a checkpoint, as evaluation does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from lacuna.data_pipelines.augment import Augment, SampleRng
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.source import OpenShard
from lacuna.trainer.config.files import load_config
from lacuna.trainer.models.classifier import build_model


def naive_scores(run: str, checkpoint: Path, opened: OpenShard) -> np.ndarray:
    """float32 [rows of the shard, L]: σ(logits)."""
    config = load_config(run + "/config.yaml", [])
    weights = load_file(checkpoint / "model.safetensors")
    model = build_model(config.model, config.data, len(weights["head.bias"]), 0).eval()
    model.load_state_dict(weights)
    augment = Augment(config.data.image_size, crop=config.data.eval_crop)
    with torch.no_grad():
        rows = [torch.sigmoid(model(augment(decode_image(opened.read(row)), SampleRng(0))[0][None])[0])
                for row in range(len(opened.members.keys))]
    return torch.cat(rows).numpy()
