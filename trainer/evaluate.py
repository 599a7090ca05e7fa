"""Evaluation: every rank scores its share of the samples, the mAP is exact over all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.batch import BadSample
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream
from lacuna.trainer.bf16 import check
from lacuna.trainer.config.sections import Config
from lacuna.trainer.methods import score_of
from lacuna.trainer.metrics.collector import ScoreCollector
from lacuna.trainer.metrics.measures import RankingResult
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.on_device.decoding import device_decoder
from lacuna.trainer.on_device.scores import Collects, ScoreBlock
from lacuna.trainer.on_device.uploads import beside
from lacuna.trainer.world import Watchdog, World

EVAL_BATCH = 64
log = logging.getLogger("lacuna")


def evaluate(model: Classifier, source: ShardSource, config: Config, world: World, watchdog: Watchdog, where: str,
             streams: Callable[[ShardSource, EpochPlan], Any]) -> RankingResult:
    """`streams`: where batches come from (cache/phase_cache.py)."""
    collector = ScoreCollector(source.classes)
    score_all(model, source, config, world, watchdog, where, streams, collector)
    return collector.result(world.control if world.size > 1 else None)


def score_all(model: Classifier, source: ShardSource, config: Config, world: World, watchdog: Watchdog, where: str,
              streams: Callable[[ShardSource, EpochPlan], Any], collector: Collects) -> None:
    """Scores are the method's. Corrupt samples are left out and named; ranks may hold different numbers of samples."""
    plan = EpochPlan(source.counts, 0, 0, world.size, EVAL_BATCH * world.size, open_shards=1, shuffle=False)
    first = source.index.counts.cumsum() - source.index.counts
    score, block = score_of(config.method), ScoreBlock(collector)
    was_training = model.training
    model.eval()
    bad: list[BadSample] = []
    with streams(source, plan) as stream, torch.no_grad(), autocast(config, world):
        for batch in stream:
            watchdog.beat(where)
            bad += batch.bad
            if len(batch):
                logits = model(model_inputs(batch.inputs, config, world))[0]
                # The ordinal makes tied scores come in the same order on any number of ranks.
                ordinals = first[batch.shards] + batch.rows
                block.add(score(logits, model.head.bias).float(), batch.labels, ordinals)
        block.flush()
    model.train(was_training)
    judge_bad([sample for part in world.gather(bad) for sample in part], int(source.counts.sum()),
              config.data.max_bad_fraction, f"data.{where}")


def judge_bad(bad: list[BadSample], samples: int, most: float, where: str) -> None:
    """A few corrupt samples are said, too many end the run: the score would be of another set."""
    if not bad:
        return
    text = (f"{len(bad)} of {samples} samples of {where} cannot be decoded, e.g. {bad[0].key!r} in "
            f"{bad[0].shard} ({bad[0].reason})")
    if len(bad) > most * samples:
        raise UserError(f"{text}: more than data.max_bad_fraction = {most} allows. "
                        "Repair them (`lacuna shards check` finds them all) or raise it.")
    log.warning("%s: the score leaves them out", text)


def eval_stream(source: ShardSource, plan: EpochPlan, config: Config, world: World) -> EpochStream:
    """This rank's part of the plan, without random augmentation."""
    maker = replace(eval_maker(config, source), decoder=device_decoder(config.data, world.device))
    return EpochStream(source, plan, plan.rank_streams(world.rank, world.size), maker,
                       workers=config.data.workers, prefetch=config.data.prefetch, pin=world.device.type == "cuda")


def model_inputs(inputs: torch.Tensor, config: Config, world: World) -> torch.Tensor:
    """A batch's inputs where the model is, in the memory format that it works in."""
    inputs = beside(inputs, world.device)
    images = config.train.channels_last and inputs.ndim == 4
    return inputs.to(memory_format=torch.channels_last) if images else inputs


def eval_maker(config: Config, source: ShardSource) -> SampleMaker:
    if source.index.kind == "feature":
        return SampleMaker(None, 0, 0, source.feature_width)
    return SampleMaker(Augment(config.data.image_size, crop=config.data.eval_crop), 0, 0)


def autocast(config: Config, world: World) -> AbstractContextManager:
    if config.train.precision != "bf16":
        return nullcontext()
    make_bf16_safe(config, world)
    return torch.autocast(world.device.type, dtype=torch.bfloat16)


def make_bf16_safe(config: Config, world: World) -> str | None:
    """Before the first bf16 operation: a line to say if this CPU needs a setting for it, or None."""
    return check.make_safe() if config.train.precision == "bf16" and world.device.type == "cpu" else None


def describe(summary: dict) -> str:
    """Both empty-class rules and how many classes each counts: means of different sets are not comparable."""
    return (f"mAP {summary['map_skip_empty']:.2f} over {summary['map_skip_empty_classes']:.0f} classes with positives "
            f"({summary['map']:.2f} over all {summary['map_classes']:.0f}, empty ones as 0)")
