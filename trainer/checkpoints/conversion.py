"""A checkpoint's weights and optimizer into DeepSpeed's engine, also into one of another number of ranks.

ZeRO partitions the optimizer over the ranks. For another number of them the checkpoint is converted to DeepSpeed's
universal form, by a program of DeepSpeed's, into a folder that goes again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from lacuna.trainer.checkpoints.checkpoint import Checkpoint
from lacuna.trainer.checkpoints.commits import MODEL
from lacuna.trainer.world import World

log = logging.getLogger("lacuna")


def needs_conversion(checkpoint: Checkpoint, world: World) -> bool:
    return checkpoint.zero_stage > 0 and checkpoint.world != world.size


def load_engine(engine, checkpoint: Checkpoint, world: World, on_every_node: bool) -> None:
    """Weights and optimizer into the engine; its files' hashes were checked when the checkpoint was read."""
    if not needs_conversion(checkpoint, world):
        _load(engine, checkpoint.folder)
        return
    folder = os.path.join(checkpoint.folder, "universal")
    converts = world.leads_node if on_every_node else world.main
    if converts:
        log.info("converting the checkpoint from %d to %d ranks", checkpoint.world, world.size)
        shutil.rmtree(folder, ignore_errors=True)  # of a launch that was killed here
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
                   "--num_extract_workers", "1", "--num_merge_workers", "1",
                   "--input_folder", os.path.join(checkpoint.folder, "engine"),
                   "--output_folder", os.path.join(folder, "engine")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ds_to_universal failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    world.barrier()
    with _empty_groups_allowed(engine.optimizer):
        _load(engine, folder)
    _load_buffers(engine.module, checkpoint)
    world.barrier()
    if converts:
        shutil.rmtree(folder, ignore_errors=True)


class _Nothing:
    """Stands for a parameter of which this rank holds no number; what DeepSpeed asks of one while it loads."""

    def __init__(self) -> None:
        self._hp_mapping = self

    def get_optim_state_keys(self) -> list[str]:
        return []

    def load_hp_checkpoint_state(self, *_, **__) -> None:
        """No step either: the optimizer begins its padding anew, which stays zero."""


@contextlib.contextmanager
def _empty_groups_allowed(optimizer) -> Iterator[None]:
    """DeepSpeed takes the step number of a group's first own parameter, and fails where a rank's part of a group is
    padding only: a bias of 10 classes is 4, 4, 2 and 0 numbers on four ranks."""
    nothing, load = _Nothing(), optimizer.load_hp_checkpoint_state_from_checkpoint_dir

    def load_groups(groups: str, folder: str) -> None:
        optimizer.groups_to_load = [
            group if any(parameter._hp_mapping is not None for parameter in group) else [nothing]
            for group in getattr(optimizer, groups)]
        load("groups_to_load", folder)

    optimizer.param_names[nothing] = "nothing"
    optimizer.load_hp_checkpoint_state_from_checkpoint_dir = load_groups
    try:
        yield
    finally:
        del optimizer.load_hp_checkpoint_state_from_checkpoint_dir, optimizer.param_names[nothing]
        vars(optimizer).pop("groups_to_load", None)


def _load_buffers(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """What a model keeps beside its parameters (statistics): the universal form has no place for it."""
    kept = load_file(os.path.join(checkpoint.folder, MODEL))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])


def _load(engine, folder: str) -> None:
    path, _ = engine.load_checkpoint(folder, tag="engine")
    if path is None:  # DeepSpeed only warns
        raise RuntimeError(f"DeepSpeed did not load {folder}/engine")
    fit_moments(getattr(engine.optimizer, "optimizer", engine.optimizer))  # ZeRO wraps torch's own


def fit_moments(optimizer: torch.optim.Optimizer) -> None:
    """Bring an optimizer's state to its parameters' devices and memory layouts, which fused kernels take for granted.

    A converted checkpoint has its step numbers on the CPU, one of train.channels_last=false other strides.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name == "step" and isinstance(value, torch.Tensor):
                state[name] = value.to(parameter.device)
            elif isinstance(value, torch.Tensor) and value.shape == parameter.shape and (
                    value.device != parameter.device or value.stride() != parameter.stride()):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
