"""A method's cut-offs as tensors for the checkpoint: after a resume inside an epoch they are not computed again."""

from __future__ import annotations

import numpy as np
import torch

from lacuna.state_store.cutoffs import Cutoffs

CUTOFF_STATE = {"codes": "int64 [L]", "bounds": "uint64 [L]", "rule": "uint64 [2]"}  # a method's class_state


def to_tensors(cutoffs: Cutoffs | None) -> dict[str, torch.Tensor]:
    if cutoffs is None:
        return {}
    return {name: torch.from_numpy(a.astype(np.int64) if a.dtype != np.uint64 else a.view(np.int64).copy())
            for name, a in cutoffs.to_arrays().items()}


def from_tensors(state: dict[str, torch.Tensor]) -> Cutoffs | None:
    if not state:
        return None
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    return Cutoffs.from_arrays({"codes": arrays["codes"], "bounds": arrays["bounds"].view(np.uint64),
                                "rule": arrays["rule"].view(np.uint64)})
