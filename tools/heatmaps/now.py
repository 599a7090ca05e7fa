"""What a trained model sees in an image now: its score maps, for methods that keep none over the epochs."""

from __future__ import annotations

import numpy as np
import torch

from lacuna.data_pipelines.augment import Augment, SampleRng
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.heatmaps.seen import SeenMap
from lacuna.tools.passes.trained import load_model, open_trained
from lacuna.trainer.methods import score_of


def maps_now(run: str, source: ShardSource, images: list[torch.Tensor]) -> list[dict[int, SeenMap]]:
    """For each image, uint8 [3, H, W] of any size, class id → the score of every cell by the run's best checkpoint."""
    trained = open_trained(run)
    model = load_model(trained, source, torch.device("cpu"))
    data = trained.config.data
    whole = Augment(data.image_size, crop=data.eval_crop)
    with torch.no_grad():
        _, maps, _ = model(torch.stack([whole(image, SampleRng(0))[0] for image in images]), with_maps=True)
        scores = score_of(trained.config.method)(maps, model.head.bias).numpy().astype(np.float32)
    return [{cls: SeenMap.plain(values) for cls, values in enumerate(maps)} for maps in scores]
