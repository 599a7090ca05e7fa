"""Weights that were published for the same architecture under other names: matched by name, else by order and shape.

A state dict lists its tensors in the order in which the model was built. Two implementations of one architecture mostly
agree in it, whatever they call their parts; so tensors are paired in order where every pair has the same shape and the
same last name (weight, bias, running_mean, running_var). Files that were sorted by name do not fit and are refused.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from lacuna.basics.errors import UserError

# What wrappers put before every name: DataParallel, Lightning, torch.compile, DeepSpeed, our own checkpoints, …
_WRAPPERS = ("module.", "model.", "_orig_mod.", "net.", "network.", "encoder.", "backbone.", "student.", "ema.")
_COUNTER = "num_batches_tracked"
_HEAD = 6  # tensors that a file may have after the backbone's, where only their order tells what they are
# Looked through when a file does not fit what was asked for.
COMMON = tuple(f"torchvision:{name}" for name in (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2", "densenet121",
    "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "mobilenet_v2", "mobilenet_v3_small",
    "mobilenet_v3_large", "convnext_tiny", "convnext_small", "convnext_base", "swin_t", "vgg16",
    "shufflenet_v2_x1_0")) + tuple(f"timm:{name}" for name in (
    "tf_efficientnet_lite0", "tf_efficientnet_lite1", "tf_efficientnet_lite2", "tf_efficientnet_lite3",
    "tf_efficientnet_lite4", "tresnet_m", "tresnet_l", "vit_small_patch16_224", "vit_base_patch16_224"))


def unwrapped(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what stands before every name; names of a head beside the wrapped part are left out with it."""
    tensors = dict(found)
    while True:
        wrapper = next((w for w in _WRAPPERS if tensors and sum(n.startswith(w) for n in tensors) > 0.9 * len(tensors)),
                       None)
        if wrapper is None:
            return tensors
        tensors = {name.removeprefix(wrapper): t for name, t in tensors.items() if name.startswith(wrapper)}


def matched(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Tensors of a file under a backbone's names, without what the file has beyond; None if they do not fit."""
    given = {name: t for name, t in unwrapped(found).items() if not name.endswith(_COUNTER)}
    asked = {name: t for name, t in wanted.items() if not name.endswith(_COUNTER)}
    if all(name in given and given[name].shape == tensor.shape for name, tensor in asked.items()):
        parts = {name.split(".")[0] for name in asked}
        # More blocks in a part than the backbone has: a larger network of the same family, not a head beside it.
        deeper = any(name not in asked and name.split(".")[0] in parts for name in given)
        return None if deeper else {name: given[name] for name in asked}
    pairs = list(zip(asked.items(), given.items(), strict=False))
    if not 0 <= len(given) - len(asked) <= _HEAD or any(not _alike(*pair) for pair in pairs):
        return None
    return {name: tensor for (name, _), (_, tensor) in pairs}


def _alike(ours: tuple[str, torch.Tensor], theirs: tuple[str, torch.Tensor]) -> bool:
    return ours[1].shape == theirs[1].shape and _last(ours[0]) == _last(theirs[0])


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def check(backbone: nn.Module, size: int, where: str) -> None:
    """That the weights make sense in this backbone: statistics are variances, features of noise finite and alive."""
    for name, tensor in backbone.state_dict().items():
        negative = name.endswith("running_var") and bool((tensor < 0).any())
        if negative or not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(f"{where}: {name} holds no plausible values, so the tensors are in another order than they "
                            "seem. Use a file in the order of the model that it was saved from.")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        out = backbone.eval()(torch.randn(2, 3, size, size, generator=generator))
    if not bool(torch.isfinite(out).all()) or float(out.std()) == 0:
        raise UserError(f"{where}: with these weights the backbone's features of a picture are all the same, or not "
                        "finite: they do not belong to this architecture.")


def closest(found: Mapping[str, torch.Tensor], path: str = "") -> tuple[str, float]:
    """The common architecture that shares most tensors' shapes with a file, and how large that part is."""
    have = Counter(tuple(t.shape) for name, t in unwrapped(found).items() if not name.endswith(_COUNTER))
    best, share = "", 0.0
    for name in COMMON:
        shapes = _shapes(name)
        common = sum((have & shapes).values()) / max(have.total(), shapes.total(), 1)
        if common > share + 1e-9 or (common == share and _like(path, name) > _like(path, best)):
            best, share = name, common
    return best, share


def _like(path: str, name: str) -> float:
    return difflib.SequenceMatcher(None, os.path.basename(path).lower(), name.partition(":")[2]).ratio()


def _shapes(name: str) -> Counter:
    """Of the whole model; built without memory for its values."""
    library, _, own = name.partition(":")
    with torch.device("meta"):
        if library == "timm":
            import timm

            body = timm.create_model(own)
        else:
            import torchvision

            body = torchvision.models.get_model(own)
    return Counter(tuple(t.shape) for key, t in body.state_dict().items() if not key.endswith(_COUNTER))
