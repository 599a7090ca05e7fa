"""From a phase's config to a DeepSpeed engine: optimizer groups, batch split, ZeRO settings."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from dataclasses import dataclass

import torch

from lacuna.basics.errors import UserError
from lacuna.basics.places import CONFIGS
from lacuna.trainer import uncompiled
from lacuna.trainer.config.sections import Config, PhaseConfig
from lacuna.trainer.gradients import Exchange, clip, sendable
from lacuna.trainer.models.classifier import Classifier, head_and_blocks
from lacuna.trainer.shared_gradients import SharedExchange, shared_slots
from lacuna.trainer.world import World

_CONFIG_FOLDER = os.path.join(CONFIGS, "deepspeed")
_OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
         "optimizer", "scheduler", "bf16", "torch_autocast")
# Gradients in one message: on CPUs what stays in the cache while it is copied, elsewhere what fills the links.
_ON_CPU, _ON_DEVICE = 4_000_000, 16_000_000


@dataclass(frozen=True)
class BatchSplit:
    """A rank's share of the global batch, cut into micro-batches."""

    share: int
    micro: int
    pieces: int

    @classmethod
    def of(cls, batch: int, micro_batch: int, world: int) -> BatchSplit:
        share = batch // world
        pieces = math.ceil(share / micro_batch) if micro_batch else 1
        return cls(share, math.ceil(share / pieces), pieces)


def build_engine(model: Classifier, config: Config, phase: PhaseConfig, world: World, universal: bool = False):
    """(DeepSpeed engine, base learning rate of every optimizer group)."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    model.set_trainable(phase.trainable)
    groups = _groups(model, phase)
    optimizer = _optimizer(groups, phase, config.train.compile)
    on_cpu = world.device.type == "cpu"
    body = deepspeed_config(config, phase, world.size)
    if "zero_optimization" in body:  # gradients travel beside the backward where that has another processor
        body["zero_optimization"] = {"overlap_comm": not on_cpu, **body["zero_optimization"]}
    if universal:
        body["checkpoint"] = {**body.get("checkpoint", {}), "load_universal": True}
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # DeepSpeed sends flat weights
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=body, dist_init_required=False)
    if not zero_stage(config, phase):
        _care_for_gradients(engine, world, _ON_CPU if on_cpu else _ON_DEVICE)
    if config.train.channels_last and not zero_stage(config, phase):
        # ZeRO's weights are views of one flat buffer and stay so: there channels-last inputs decide.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return engine, [group["lr"] for group in groups]


def _care_for_gradients(engine, world: World, bucket_size: int) -> None:
    """Our own ways instead of DeepSpeed's: it sends all gradients after the backward, and its clipping waits for the
    device."""
    learning = [p for p in engine.module.parameters() if p.requires_grad]
    engine.clip_fp32_gradients = lambda: clip(learning, engine.gradient_clipping())
    plain = (engine.communication_data_type == torch.float32 and engine.gradient_average
             and engine.postscale_gradients() and engine.gradient_predivide_factor() == 1)
    if world.size == 1:
        engine.enable_backward_allreduce = False  # nobody to average with: a sixth of a small model's step
    elif plain:
        exchange, destroy = _exchange(engine, world, bucket_size), engine.destroy
        engine.allreduce_gradients = exchange.finish

        def close() -> None:
            exchange.close()
            destroy()

        engine.destroy = close
    else:
        # By default all gradients are copied into one new buffer and back: a third of an exchange on CPUs.
        engine.allreduce_gradients = functools.partial(engine.allreduce_gradients, bucket_size=bucket_size)


def _exchange(engine, world: World, bucket_size: int) -> Exchange | SharedExchange:
    if world.device.type == "cpu":
        slots = shared_slots(world, sum(p.numel() for p in sendable(engine.module)))
        if slots is not None:
            return SharedExchange(engine, world, slots)
    return Exchange(engine, world.size, bucket_size)


def deepspeed_config(config: Config, phase: PhaseConfig, world: int) -> dict:
    path = config.train.deepspeed
    if not path.endswith(".json"):
        path = os.path.join(_CONFIG_FOLDER, path + ".json")
    try:
        with open(path, encoding="utf-8") as f:
            body = json.load(f)
    except FileNotFoundError:
        names = sorted(n.removesuffix(".json") for n in os.listdir(_CONFIG_FOLDER))
        raise UserError(f"train.deepspeed = {config.train.deepspeed!r}: no such file; in configs/deepspeed/ there are: "
                        f"{', '.join(names)}.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from None
    if body.get("fp16", {}).get("enabled"):
        raise UserError(f"{path}: fp16 is not supported (losses underflow). Use train.precision=bf16.")
    clash = [key for key in _OURS if key in body]
    if clash:
        raise UserError(f"{path}: remove {clash[0]!r}; it is set by the phases and the train section of the config.")
    if body.get("zero_optimization", {}).get("stage", 0) > 2:
        raise UserError(f"{path}: ZeRO stage 3 is not supported; use stage 0, 1 or 2.")
    split = BatchSplit.of(phase.batch, config.train.micro_batch, world)
    return {
        # It waits for the device twice per micro-batch, for a speed that the run log knows anyway.
        "timers": {"throughput": {"enabled": False}},
        **body,
        "train_micro_batch_size_per_gpu": split.micro, "gradient_accumulation_steps": split.pieces,
        "train_batch_size": split.micro * split.pieces * world, "gradient_clipping": config.train.clip_norm,
        # The optimizer is torch's own: DeepSpeed's would be compiled on first use.
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
        # The engine switches an autocast from outside off on GPUs: it has to do it itself. Gradients travel in fp32.
        "torch_autocast": {"enabled": config.train.precision == "bf16", "dtype": "bfloat16",
                           "lower_precision_safe_modules": []},
    }


def zero_stage(config: Config, phase: PhaseConfig) -> int:
    return int(deepspeed_config(config, phase, 1).get("zero_optimization", {}).get("stage", 0))


def _groups(model: Classifier, phase: PhaseConfig) -> list[dict]:
    """Blocks of the backbone and the head, each split by weight decay: biases and norms (one-dimensional) have none."""
    head, blocks = head_and_blocks(model)
    parts = [(block, phase.lr * phase.layer_decay ** (len(blocks) - 1 - i), phase.weight_decay)
             for i, block in enumerate(blocks)]
    if phase.layer_decay == 1:
        parts = [([p for block in blocks for p in block], phase.lr, phase.weight_decay)]
    groups: dict[tuple[float, float], dict] = {}  # those with equal settings are one: each costs a step of its own
    for parameters, lr, decay in [*parts, (head, phase.lr * phase.head_lr_multiplier, phase.decay_of_head)]:
        for parameter in parameters:
            key = lr, decay if parameter.ndim > 1 else 0.0
            group = groups.setdefault(key, {"params": [], "lr": key[0], "weight_decay": key[1]})
            group["params"].append(parameter)
    return list(groups.values())


def _optimizer(groups: list[dict], phase: PhaseConfig, compiled: bool) -> torch.optim.Optimizer:
    # One pass over memory instead of one per operation: Adam's step of a ResNet-18 takes 15 ms instead of 60 or more
    # on a CPU core. Other devices have no such kernel in every version of torch.
    # Compiled gradients may be laid out otherwise than their parameters, which the kernels do not take.
    fused = not compiled and all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    kinds = torch.optim if compiled else uncompiled
    if phase.optimizer == "sgd":
        return kinds.SGD(groups, lr=phase.lr, momentum=phase.momentum, fused=fused)
    optimizer: torch.optim.Optimizer
    if phase.optimizer == "adamax":  # has no fused kernel
        optimizer = kinds.Adamax(groups, lr=phase.lr)
    else:
        optimizer = (kinds.AdamW if phase.optimizer == "adamw" else kinds.Adam)(groups, lr=phase.lr, fused=fused)
    if all(p.device.type == "cpu" for group in groups for p in group["params"]):
        # Looks for a GPU's driver in every step, to say that a step is not captured in a CUDA graph: a tenth of a small
        # model's step.
        optimizer._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    return optimizer


def set_lr(engine, base: list[float], factor: float) -> None:
    for group, lr in zip(engine.optimizer.param_groups, base, strict=True):
        group["lr"] = lr * factor
