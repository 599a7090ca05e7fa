"""What a trained model sees in an image now: its score maps, for methods that keep none over the epochs."""

from __future__ import annotations

import torch

from lacuna.data_pipelines.augment import Augment, SampleRng
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.heatmaps.seen import SeenMap
from lacuna.tools.passes.trained import load_model, open_trained
from lacuna.trainer.methods import score_of


def maps_now(run: str, source: ShardSource, images: list[torch.Tensor]) -> list[dict[int, SeenMap]]:
    """For each image, uint8 [3, H, W] of any size, class id → where the run's best checkpoint finds evidence for it.

    A logit is the mean of the cells' scores, which are so far from 0 that as probabilities they would all be black or
    red. So a map is what cells add to the head's bias, relative to the cell that adds most, times the image's score.
    """
    trained = open_trained(run)
    model = load_model(trained, source, torch.device("cpu"))
    data = trained.config.data
    whole = Augment(data.image_size, crop=data.eval_crop)
    with torch.no_grad():
        logits, cells, _ = model(torch.stack([whole(image, SampleRng(0))[0] for image in images]), with_maps=True)
        assert cells is not None, "asked for"
        bias = model.head.bias
        scores = score_of(trained.config.method)(logits, bias)
        evidence = torch.relu(cells - bias[:, None, None])
        maps = evidence / evidence.amax((2, 3), keepdim=True).clamp(min=1e-6) * scores[:, :, None, None]
    return [{cls: SeenMap.plain(values) for cls, values in enumerate(image)} for image in maps.numpy()]
