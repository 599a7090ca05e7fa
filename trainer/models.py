"""Backbones and the classifier: a 1x1 head over the feature map that gives logits and, on demand, score maps.

Legend: B batch, D feature width, L classes, G grid side of the feature map.
Pooling and the linear head commute, so logits are computed from pooled features; maps cost extra only when asked.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import nn

from data_pipelines.errors import UserError
from trainer.config import DataConfig, ModelConfig

_NORMS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "centered": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


class Classifier(nn.Module):
    """Inputs: uint8 [B, 3, H, W] (normalised here, on the device), or float [B, D] features."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, backbone: nn.Module, width: int, classes: int, config: ModelConfig, normalize: str):
        super().__init__()
        self.backbone = backbone
        self.neck = nn.Linear(width, config.bottleneck) if config.bottleneck else nn.Identity()
        self.head = nn.Linear(config.bottleneck or width, classes)
        self.freeze_statistics = config.batchnorm == "frozen"
        self.freeze_backbone = False
        mean, std = _NORMS[normalize]
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1) * 255, persistent=False)

    def forward(self, inputs: torch.Tensor, with_maps: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """logits [B, L] and score-map logits [B, L, G, G] (None unless asked)."""
        features = self.features(inputs)
        if features.ndim == 2:
            return self.head(self.neck(features)).float(), None
        logits = self.head(self.neck(features.mean((2, 3)))).float()
        if not with_maps:
            return logits, None
        cells = self.head(self.neck(features.permute(0, 2, 3, 1)))
        return logits, cells.permute(0, 3, 1, 2).float()

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        """[B, D, G, G], or [B, D] for feature shards."""
        if inputs.dtype == torch.uint8:
            inputs = (inputs.float() - self.mean) / self.std
        if self.freeze_backbone:
            with torch.no_grad():
                return self.backbone(inputs)
        return self.backbone(inputs)

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        if self.freeze_backbone:
            self.backbone.eval()
        if self.freeze_statistics:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def set_trainable(self, part: str) -> None:
        """'head': the backbone is fixed and stays in evaluation mode; 'all': everything learns."""
        self.freeze_backbone = part == "head"
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(part == "all")


class _Tokens(nn.Module):
    """A transformer's tokens as a map: prefix tokens dropped, the rest laid out on their grid."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.body.forward_features(inputs)  # type: ignore[operator]
        if out.ndim == 4:
            return out if out.shape[1] == self.body.num_features else out.permute(0, 3, 1, 2)
        out = out[:, getattr(self.body, "num_prefix_tokens", 0) :]
        side = math.isqrt(out.shape[1])
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], side, side)


def build_model(config: ModelConfig, data: DataConfig, classes: int, feature_width: int) -> Classifier:
    """`feature_width` is the vector length of feature shards, 0 for images."""
    source, _, name = config.backbone.partition(":")
    if (source == "features") != bool(feature_width):
        found = "feature vectors" if feature_width else "images"
        raise UserError(f"model.backbone = {config.backbone!r}, but data.train holds {found}. Use 'features' for "
                        "feature shards, and 'torchvision:NAME' or 'timm:NAME' for images.")
    if source == "features":
        return Classifier(nn.Identity(), feature_width, classes, config, data.normalize)
    if source not in _SOURCES or not name:
        raise UserError(f"model.backbone = {config.backbone!r}: write 'torchvision:NAME', 'timm:NAME' or 'features'.")
    backbone = _SOURCES[source](name, config.weights)
    if config.weights.endswith((".safetensors", ".pt", ".pth")):
        _load_file(backbone, config.weights)
    with torch.no_grad():
        probe = backbone.eval()(torch.zeros(1, 3, data.image_size, data.image_size))
    return Classifier(backbone, probe.shape[1], classes, config, data.normalize)


def _torchvision(name: str, weights: str) -> nn.Module:
    import torchvision

    try:
        chosen = None if _own_weights(weights) else torchvision.models.get_model_weights(name)[_weight_name(weights)]
        body = torchvision.models.get_model(name, weights=chosen)
    except (ValueError, KeyError) as error:
        raise UserError(f"model.backbone 'torchvision:{name}' with model.weights = {weights!r}: {error}. "
                        "See torchvision.models.list_models().") from None
    if hasattr(body, "features"):
        return body.features  # type: ignore[return-value]
    if hasattr(body, "layer4"):
        parts = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        return nn.Sequential(*[getattr(body, part) for part in parts])
    raise UserError(f"model.backbone 'torchvision:{name}' has no feature map we know. Use its timm twin: 'timm:NAME'.")


def _timm(name: str, weights: str) -> nn.Module:
    import timm

    if weights not in ("none", "default") and not _own_weights(weights):
        raise UserError(f"model.weights = {weights!r}: for timm write 'none', 'default' or a file; "
                        "a pretrained tag belongs to the name, as in 'timm:tresnet_m.miil_in21k'.")
    try:
        return _Tokens(timm.create_model(name, pretrained=weights == "default", num_classes=0))
    except RuntimeError as error:
        raise UserError(f"model.backbone 'timm:{name}': {error}. See timm.list_models().") from None


def _lacuna(name: str, weights: str) -> nn.Module:
    """`tiny`: four plain convolutions for the demo and tests; no norm, so results do not depend on the ranks."""
    if name != "tiny":
        raise UserError(f"model.backbone 'lacuna:{name}': there is only 'lacuna:tiny'.")
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.zeros_(layers[-2].bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers)


_SOURCES: dict[str, Callable[[str, str], nn.Module]] = {"torchvision": _torchvision, "timm": _timm, "lacuna": _lacuna}


def _own_weights(weights: str) -> bool:
    return weights == "none" or os.path.sep in weights or weights.endswith((".safetensors", ".pt", ".pth"))


def _weight_name(weights: str) -> str:
    return "DEFAULT" if weights == "default" else weights


def _load_file(backbone: nn.Module, path: str) -> None:
    """A whole backbone from a file; never unpickles code. Names must fit, or the tensors in order."""
    if not os.path.exists(path):
        raise UserError(f"model.weights = {path!r}: no such file.")
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        found = load_file(path)
    else:
        found = torch.load(path, map_location="cpu", weights_only=True)
        found = found.get("state_dict", found.get("model", found))
    own = (backbone.body if isinstance(backbone, _Tokens) else backbone).state_dict()  # type: ignore[union-attr]
    target = backbone.body if isinstance(backbone, _Tokens) else backbone
    kept = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
    missing = [name for name in own if name not in kept and not name.endswith("num_batches_tracked")]
    if missing:
        raise UserError(f"model.weights = {path!r} lacks {len(missing)} of {len(own)} tensors of the backbone, e.g. "
                        f"{missing[0]!r}. Is it the right architecture?")
    target.load_state_dict(kept, strict=False)  # type: ignore[union-attr]


def spatial_side(model: Classifier, size: int) -> int:
    """G, the side of the score maps for images of `size`."""
    blank = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=model.mean.device)
    with torch.no_grad():
        return model.eval().features(blank).shape[-1]


def head_and_backbone(model: Classifier) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    body = [p for p in model.backbone.parameters() if p.requires_grad]
    return [*model.neck.parameters(), *model.head.parameters()], body
