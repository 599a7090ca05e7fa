"""How the head starts, before the first step of a run: its weights from vectors of the classes, if there are any, its
bias at the prior, its norm from a look at the data."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.trainer.class_vectors import read_class_vectors
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.evaluate import model_inputs
from lacuna.trainer.methods.base import Task
from lacuna.trainer.models.classifier import Classifier, set_head_bias
from lacuna.trainer.models.decoders.base import Decoder
from lacuna.trainer.models.head_norm import Sums
from lacuna.trainer.training_data import epoch_plan

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run

_SAMPLES = 16_384  # whose mean and spread stand for all, where a backbone has to look at them; features are all read
_DIRECTIONS = 41  # keeps this use of the seed apart from others
log = logging.getLogger("lacuna")


def start_weights(model: Classifier, config: ModelConfig, task: Task) -> None:
    """From vectors of the classes: see model.head_init."""
    if config.head_init is None:
        return
    vectors = torch.from_numpy(read_class_vectors(config.head_init, task.class_names, "model.head_init ="))
    if isinstance(model.head, Decoder):
        if not model.head.of_classes:
            raise UserError(f"model.head_init = {config.head_init!r} starts a query per class, but model.head = "
                            f"{config.head!r} has {len(model.head.queries)} for {task.classes} classes. Set "
                            f"model.decoder.groups={task.classes}, or leave head_init out.")
        weight: torch.Tensor = model.head.queries
    else:
        weight = model.head.weight
    wanted = fitted(vectors, weight.shape[1], task.seed)
    with torch.no_grad():
        scale = weight.norm() / wanted.norm().clamp(min=1e-12)
        if config.head_init_length is not None:
            lengths = wanted.norm(dim=1)
            scale = config.head_init_length / lengths[lengths > 0].mean()
        weight.copy_((wanted * scale).to(weight))
        model.head_start = weight.detach().clone()


def fitted(vectors: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """[L, D] → [L, width]. Of another width: their principal parts, as many as fit, along directions drawn by the seed.
    Products between the vectors stay; exactly, where the width is at least their rank."""
    if vectors.shape[1] == width:
        return vectors
    left, sizes, _ = torch.linalg.svd(vectors.double(), full_matrices=False)
    kept = min(len(sizes), width)
    generator = torch.Generator().manual_seed(mix(seed, _DIRECTIONS) >> 1)
    directions = torch.linalg.qr(torch.randn(width, kept, dtype=torch.float64, generator=generator)).Q
    return (left[:, :kept] * sizes[:kept] @ directions.T).float()


def start_bias(model: Classifier, config: ModelConfig, task: Task, main: bool) -> None:
    """`prior` takes k as it is known, else the annotated positives per image, which are fewer than the true ones."""
    k = task.expected_positives
    if config.head_bias == "prior" and k is None:
        k = float(task.positives.sum() / max(1, task.samples))
        if not k:
            raise UserError("model.head_bias = 'prior' needs the number of positives per image, but no training image "
                            "has an annotated one. Give model.expected_positives, or model.head_bias=zero.")
        if main and not task.fully_annotated:
            log.info("head bias at the prior of %.2f positives per image: the annotated ones, a lower bound of the "
                     "true ones; give model.expected_positives if you know better", k)
    # Every class its share of the annotated positives; one more each, so that none starts at minus infinity.
    shares = torch.from_numpy(task.positives + 1.0) / float(task.positives.sum() + task.classes)
    set_head_bias(model, config.head_bias, (k or 0.0) * shares)


def measure_head_norm(run: Run) -> None:
    """Mean and scale of model.head_norm, from the first samples of the first epoch as evaluation sees them: the same
    samples on any number of ranks."""
    if run.model.head_norm is None:
        return
    assert isinstance(run.model.head, torch.nn.Linear)
    source, world = run.sources["train"], run.world
    plan = epoch_plan(run.config, source, 0, 0)
    steps = plan.steps if source.feature_width else min(plan.steps, math.ceil(_SAMPLES / plan.batch))
    sums = Sums.none(run.model.head.in_features)
    run.model.eval()
    with run.cache.evaluation(source, plan) as stream, torch.no_grad():
        batches = iter(stream)
        for _ in range(steps):
            found = next(batches)
            run.watchdog.beat("measuring what enters the head")
            if len(found):
                sums.add(run.model.pooled(run.model.features(model_inputs(found.inputs, run.config, world))))
    sums.flat = world.global_sum(sums.flat.to(world.device)).cpu()
    run.model.head_norm.take(sums)
    log.info("model.head_norm: measured on %d samples, scale %.3g", int(sums.flat[0]), float(run.model.head_norm.scale))
