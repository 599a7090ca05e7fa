"""Backbones by their source and name: what leads from an image to a feature map [B, D, G, G].

Legend: B batch, D feature width, G grid side of the feature map.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.trainer.models.weights import is_file

# What leads to the feature map, by torchvision's class; other classes have it all in `features`.
_PARTS = {
    "ResNet": ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"),
    "RegNet": ("stem", "trunk_output"),
    "ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5"),
    "SwinTransformer": ("features", "norm", "permute"),  # its features are [B, G, G, D] before the permutation
    "MNASNet": ("layers",),
}


class _Tokens(nn.Module):
    """A transformer's tokens as a map: prefix tokens dropped, the rest laid out on their grid."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.laid_out(self.body.forward_features(inputs))  # type: ignore[operator]

    def laid_out(self, out: torch.Tensor) -> torch.Tensor:
        if out.ndim == 4:
            return out if out.shape[1] == self.body.num_features else out.permute(0, 3, 1, 2)
        side = math.isqrt(out.shape[1])
        prefix = getattr(self.body, "num_prefix_tokens", out.shape[1] - side**2)  # class and register tokens
        out, side = out[:, prefix:], math.isqrt(out.shape[1] - prefix)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], side, side)


def _torchvision(name: str, weights: str, size: int) -> tuple[nn.Module, nn.Module]:
    import torchvision

    chosen = None
    try:
        if weights != "none" and not is_file(weights):
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

    if weights not in ("none", "default") and not is_file(weights):
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
                     ".safetensors or .pth file of them (`lacuna weights` finds and converts such files), or 'none'.")


def _lacuna(name: str, weights: str, size: int) -> tuple[nn.Module, nn.Module]:
    """`tiny`: four plain convolutions for the demo and tests; no norm, so results do not depend on the ranks."""
    if name != "tiny":
        raise UserError(f"model.backbone 'lacuna:{name}': there is only 'lacuna:tiny'.")
    if weights != "none" and not is_file(weights):
        raise UserError(f"model.weights = {weights!r}: for lacuna:tiny write 'none' or a file.")
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.zeros_(layers[-2].bias)  # type: ignore[arg-type]
    body = nn.Sequential(*layers)
    return body, body


# Each gives the whole model and its part that leads to the feature map.
SOURCES: dict[str, Callable[[str, str, int], tuple[nn.Module, nn.Module]]] = {
    "torchvision": _torchvision, "timm": _timm, "lacuna": _lacuna,
}
