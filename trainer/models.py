"""Backbones and the classifier: a 1x1 head over the feature map that gives logits and, on demand, score maps.

Legend: B batch, D feature width, L classes, G grid side of the feature map.
Pooling and the linear head commute, so logits are computed from pooled features; maps cost extra only when asked.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from data_pipelines.errors import UserError
from trainer.backbone_parts import learning, published_names
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

    def __init__(self, backbone: nn.Module, width: int, classes: int, config: ModelConfig, normalize: str,
                 names: dict[str, str] | None = None):
        """`names`: how the publisher of the backbone calls its modules and parameters."""
        super().__init__()
        self.backbone = backbone
        self.names = names or published_names(backbone, backbone)
        self.neck = nn.Linear(width, config.bottleneck) if config.bottleneck else nn.Identity()
        self.head = nn.Linear(config.bottleneck or width, classes)
        self.width = width
        self.extra: nn.Module | None = None  # what a method trains beside the head
        self.boost = config.boost
        self.freeze_statistics = config.batchnorm == "frozen"
        self.set_trainable("all")
        mean, std = _NORMS[normalize]
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1) * 255, persistent=False)

    def forward(self, inputs: torch.Tensor,
                with_maps: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """logits [B, L], score-map logits [B, L, G, G] (None unless asked), and the features themselves."""
        features = self.features(inputs)
        if features.ndim == 2:
            return self.head(self.neck(features)).float(), None, features
        logits = self.head(self.neck(features.mean((2, 3)))).float() if self.boost == 1 else None
        if logits is not None and not with_maps:
            return logits, None, features
        maps = self.head(self.neck(features.permute(0, 2, 3, 1))).permute(0, 3, 1, 2).float()
        if logits is None:  # boosted scores do not commute with pooling
            maps = torch.where(maps > 0, self.boost * maps, maps)
            logits = maps.mean((2, 3))
        return logits, maps if with_maps else None, features

    @property
    def blank(self) -> tuple[int, int, int]:
        """The colour that is 0 after normalisation."""
        red, green, blue = self.mean.flatten().round().int().tolist()
        return red, green, blue

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Weights of a run whose method trained something beside the head load without it where no method is."""
        if self.extra is None:
            state_dict = {name: tensor for name, tensor in state_dict.items() if not name.startswith("extra.")}
        return super().load_state_dict(state_dict, strict, assign)

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        """[B, D, G, G], or [B, D] for feature shards."""
        inputs = self.normalized(inputs)
        if not self.learning:
            with torch.no_grad():
                return self.backbone(inputs)
        return self.backbone(inputs)

    def normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.float() - self.mean) / self.std if inputs.dtype == torch.uint8 else inputs

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        for name, module in self.backbone.named_modules():
            if name not in self.learning:
                module.training = False
        if self.freeze_statistics:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def set_trainable(self, trainable: str | tuple[str, ...]) -> None:
        """'head', 'all', or the head and parts of the backbone by name; what is fixed stays in evaluation mode."""
        self.learning = learning(self.names, trainable)
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(name in self.learning)


class _Tokens(nn.Module):
    """A transformer's tokens as a map: prefix tokens dropped, the rest laid out on their grid."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.body.forward_features(inputs)  # type: ignore[operator]
        if out.ndim == 4:
            return out if out.shape[1] == self.body.num_features else out.permute(0, 3, 1, 2)
        side = math.isqrt(out.shape[1])
        prefix = getattr(self.body, "num_prefix_tokens", out.shape[1] - side**2)  # class and register tokens
        out, side = out[:, prefix:], math.isqrt(out.shape[1] - prefix)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], side, side)


def build_model(config: ModelConfig, data: DataConfig, classes: int, feature_width: int) -> Classifier:
    """`feature_width` is the vector length of feature shards, 0 for images."""
    source, _, name = config.backbone.partition(":")
    if (source == "features") != bool(feature_width):
        found = "feature vectors" if feature_width else "images"
        raise UserError(f"model.backbone = {config.backbone!r}, but data.train holds {found}. Use 'features' for "
                        "feature shards, and 'torchvision:NAME' or 'timm:NAME' for images.")
    if source == "features" and config.boost != 1:
        raise UserError(f"model.boost = {config.boost} boosts score maps, but data.train holds feature vectors. Use "
                        "image shards, or model.boost=1.")
    if source == "features":
        return Classifier(nn.Identity(), feature_width, classes, config, data.normalize)
    if source not in _SOURCES or not name:
        raise UserError(f"model.backbone = {config.backbone!r}: write 'torchvision:NAME', 'timm:NAME' or 'features'.")
    body, backbone = _SOURCES[source](name, config.weights, data.image_size)
    if _is_file(config.weights):
        _load_file(body, backbone, config.weights)
    return Classifier(backbone, _probe(backbone, config, data.image_size), classes, config, data.normalize,
                      published_names(body, backbone))


def _probe(backbone: nn.Module, config: ModelConfig, size: int) -> int:
    """The feature width D, from a blank image; a backbone that cannot take the size is named here, not in step 1."""
    try:
        with torch.no_grad():
            shape = backbone.eval()(torch.zeros(1, 3, size, size)).shape
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"model.backbone = {config.backbone!r} cannot take data.image_size = {size}: {error}. "
                        "Use the size it was made for, or another backbone.") from None
    if len(shape) != 4 or shape[2] != shape[3]:
        raise UserError(f"model.backbone = {config.backbone!r} gives {list(shape)} instead of a square feature map. "
                        "Use another backbone.")
    return shape[1]


# What leads to the feature map, by torchvision's class; other classes have it all in `features`.
_PARTS = {
    "ResNet": ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"),
    "RegNet": ("stem", "trunk_output"),
    "ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5"),
    "SwinTransformer": ("features", "norm", "permute"),  # its features are [B, G, G, D] before the permutation
    "MNASNet": ("layers",),
}


def _torchvision(name: str, weights: str, size: int) -> tuple[nn.Module, nn.Module]:
    import torchvision

    chosen = None
    try:
        if weights != "none" and not _is_file(weights):
            legal = torchvision.models.get_model_weights(name).__members__
            chosen = legal.get("DEFAULT" if weights == "default" else weights)
            if chosen is None:
                raise UserError(f"model.weights = {weights!r}: for torchvision:{name} write 'none', 'default', a file, "
                                f"or one of {', '.join(key for key in legal if key != 'DEFAULT')}.")
        body = torchvision.models.get_model(name, weights=chosen)
    except OSError as error:
        raise _not_fetched(weights, error) from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        close = difflib.get_close_matches(name, torchvision.models.list_models(), 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"model.backbone 'torchvision:{name}': {error}. {hint}"
                        "torchvision.models.list_models() names them all.") from None
    kind = type(body).__name__
    if kind in _PARTS:
        part: nn.Module = nn.Sequential(*[getattr(body, part) for part in _PARTS[kind]])
    elif isinstance(getattr(body, "features", None), nn.Module):
        part = body.features
        if kind == "DenseNet":  # its last ReLU is in forward()
            part = nn.Sequential(*part, nn.ReLU())  # type: ignore[misc]
    else:
        raise UserError(f"model.backbone 'torchvision:{name}' has no feature map that we know. "
                        "Use its timm twin: 'timm:NAME'.")
    return body, part


def _timm(name: str, weights: str, size: int) -> tuple[nn.Module, nn.Module]:
    import timm

    if weights not in ("none", "default") and not _is_file(weights):
        raise UserError(f"model.weights = {weights!r}: for timm write 'none', 'default' or a file; "
                        "a pretrained tag belongs to the name, as in 'timm:tresnet_m.miil_in21k'.")
    made_for = timm.models.get_pretrained_cfg(name)
    own_size = made_for.input_size[-1] if made_for is not None and made_for.fixed_input_size else size
    # Position embeddings are laid out for the size, pretrained ones resampled to it.
    options: dict[str, Any] = {} if own_size == size else {"img_size": size}
    try:
        body = timm.create_model(name, pretrained=weights == "default", num_classes=0, **options)
    except TypeError:
        raise UserError(f"model.backbone 'timm:{name}' takes images of {own_size} pixels only, "
                        f"data.image_size is {size}.") from None
    except OSError as error:
        raise _not_fetched(weights, error) from None
    except (RuntimeError, AssertionError) as error:
        close = difflib.get_close_matches(name, timm.list_models(), 1)
        hint = f"did you mean {close[0]!r}? " if close and close[0] != name else ""
        raise UserError(f"model.backbone 'timm:{name}' at data.image_size = {size}: {error}. {hint}"
                        "timm.list_models() names them all.") from None
    return body, _Tokens(body)


def _not_fetched(weights: str, error: OSError) -> UserError:
    return UserError(f"model.weights = {weights!r} could not be fetched ({error}). Without a connection, give a "
                     ".safetensors or .pth file of them, or 'none'.")


def _lacuna(name: str, weights: str, size: int) -> tuple[nn.Module, nn.Module]:
    """`tiny`: four plain convolutions for the demo and tests; no norm, so results do not depend on the ranks."""
    if name != "tiny":
        raise UserError(f"model.backbone 'lacuna:{name}': there is only 'lacuna:tiny'.")
    if weights != "none" and not _is_file(weights):
        raise UserError(f"model.weights = {weights!r}: for lacuna:tiny write 'none' or a file.")
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.zeros_(layers[-2].bias)  # type: ignore[arg-type]
    body = nn.Sequential(*layers)
    return body, body


# Each gives the whole model and its part that leads to the feature map.
_SOURCES: dict[str, Callable[[str, str, int], tuple[nn.Module, nn.Module]]] = {
    "torchvision": _torchvision, "timm": _timm, "lacuna": _lacuna,
}


def _is_file(weights: str) -> bool:
    return os.path.sep in weights or weights.endswith((".safetensors", ".pt", ".pth"))


def _load_file(body: nn.Module, part: nn.Module, path: str) -> None:
    """Fill `part`, the feature part of the whole model `body`; never unpickles code.

    The file holds the whole model under its publisher's names, or is the model.safetensors of one of our runs.
    """
    found = {name.removeprefix("module."): tensor for name, tensor in _read_tensors(path).items()}
    target = body
    if any(name.startswith("backbone.") for name in found):
        target = part
        found = {name.removeprefix("backbone."): t for name, t in found.items() if name.startswith("backbone.")}
    needed = {id(tensor) for tensor in part.state_dict(keep_vars=True).values()}
    wanted = {name: tensor for name, tensor in target.state_dict(keep_vars=True).items() if id(tensor) in needed}
    lacking = [name for name, tensor in wanted.items() if not name.endswith("num_batches_tracked")
               and (name not in found or found[name].shape != tensor.shape)]
    if lacking:
        raise UserError(f"model.weights = {path!r} lacks {len(lacking)} of {len(wanted)} tensors of the backbone, or "
                        f"has them in another shape, e.g. {lacking[0]!r}. Is it the right architecture?")
    with torch.no_grad():
        for name in wanted.keys() & found.keys():
            wanted[name].copy_(found[name])


def _read_tensors(path: str) -> dict[str, torch.Tensor]:
    if not os.path.exists(path):
        raise UserError(f"model.weights = {path!r}: no such file.")
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and safetensors raise many kinds for damaged or unsafe files
        reason = str(error).partition("\n")[0]
        raise UserError(f"model.weights = {path!r}: not a file of plain tensors ({reason}).") from None
    while isinstance(found, dict) and (inner := found.get("state_dict", found.get("model"))) is not None:
        found = inner
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise UserError(f"model.weights = {path!r}: expected named tensors, alone or under 'state_dict' or 'model'.")
    return found


def spatial_side(model: Classifier, size: int) -> int:
    """G, the side of the score maps for images of `size`."""
    blank = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=model.mean.device)
    with torch.no_grad():
        return model.eval().features(blank).shape[-1]


def head_and_backbone(model: Classifier) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    body = [p for p in model.backbone.parameters() if p.requires_grad]
    extra = model.extra.parameters() if model.extra is not None else ()
    return [*model.neck.parameters(), *model.head.parameters(), *extra], body
