"""Weights from a file into a backbone; code in a file is never run."""

from __future__ import annotations

import os

import torch
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.trainer.models.foreign import closest, matched, unwrapped

# Where checkpoints of other programs keep the weights: Lightning, training scripts, DeepSpeed (…_model_states.pt).
_UNDER = ("state_dict", "model_state_dict", "model", "module")


def is_file(weights: str) -> bool:
    return os.path.sep in weights or weights.endswith((".safetensors", ".pt", ".pth", ".ckpt", ".bin"))


def load_weights(body: nn.Module, part: nn.Module, path: str, given: str = "model.weights =") -> None:
    """Fill `part`, the feature part of the whole model `body`; never unpickles code.

    The file holds the whole model under its publisher's names or in its order (foreign.py), or is the model.safetensors
    of one of our runs. `given`: the key or flag that names the file, for messages.
    """
    read = {name.removeprefix("module."): tensor for name, tensor in read_tensors(path, given).items()}
    own = part.state_dict(keep_vars=True)
    needed = {id(tensor) for tensor in own.values()}
    published = {name: tensor for name, tensor in body.state_dict(keep_vars=True).items() if id(tensor) in needed}
    ours = {name.removeprefix("backbone."): t for name, t in read.items() if name.startswith("backbone.")}
    for tensors, wanted in ((ours, own), (read, published)):
        found = matched(tensors, wanted) if tensors else None
        if found is not None:
            with torch.no_grad():
                for name, tensor in found.items():
                    wanted[name].copy_(tensor)
            return
    asked = own if ours else published
    there = ours or unwrapped(read)
    lacking = [name for name, tensor in asked.items() if not name.endswith("num_batches_tracked")
               and (name not in there or there[name].shape != tensor.shape)]
    name, share = closest(read, path)
    what = (f"lacks {len(lacking)} of {len(asked)} tensors of the backbone, or has them in another shape, e.g. "
            f"{lacking[0]!r}") if lacking else "has more blocks than the backbone"
    raise UserError(f"{given} {path!r} {what}. Is it the right architecture? The closest architecture: "
                    f"{name} ({share:.0%} of the shapes). `lacuna weights` converts files of other libraries.")


def read_tensors(path: str, given: str = "model.weights =") -> dict[str, torch.Tensor]:
    """`given`: the key or flag that names the file, for messages."""
    if not os.path.exists(path):
        raise UserError(f"{given} {path!r}: no such file.")
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and safetensors raise many kinds for damaged or unsafe files
        reason = str(error).partition("\n")[0]
        raise UserError(f"{given} {path!r}: not a file of plain tensors ({reason}).") from None
    while isinstance(found, dict) and (inner := next((found[key] for key in _UNDER if isinstance(found.get(key), dict)),
                                                     None)) is not None:
        found = inner
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise UserError(f"{given} {path!r}: expected named tensors, alone or under one of {', '.join(_UNDER)}.")
    return found
