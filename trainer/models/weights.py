"""Weights from a file into a backbone; code in a file is never run."""

from __future__ import annotations

import os

import torch
from torch import nn

from lacuna.basics.errors import UserError


def is_file(weights: str) -> bool:
    return os.path.sep in weights or weights.endswith((".safetensors", ".pt", ".pth"))


def load_weights(body: nn.Module, part: nn.Module, path: str) -> None:
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
