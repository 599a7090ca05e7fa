"""CLIP and SigLIP as open_clip builds them, small and with random weights, in folders as it saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def small_clip(folder: Path, bias: float | None = None) -> str:
    """The folder; with a bias the model is one that was trained with sigmoids."""
    import open_clip

    folder.mkdir()
    body = {"embed_dim": 16, "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16},
            "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}}
    if bias is not None:
        body |= {"init_logit_bias": bias}
    (folder / "open_clip_config.json").write_text(json.dumps({
        "model_cfg": body, "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}}))
    torch.manual_seed(5)
    options = {key: value for key, value in body.items() if key not in ("embed_dim", "vision_cfg", "text_cfg")}
    model = open_clip.CLIP(16, body["vision_cfg"], body["text_cfg"], **options)
    with torch.no_grad():
        model.logit_scale.fill_(2.5)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()},
              folder / "open_clip_model.safetensors")
    return str(folder)
