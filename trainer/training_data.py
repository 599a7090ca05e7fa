"""Which training samples come when, and how they are made: an epoch's plan and its stream, from the config alone."""

from __future__ import annotations

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream, SampleMaker
from lacuna.trainer.config.sections import Config, DataConfig


def epoch_plan(config: Config, source: ShardSource, phase: int, epoch: int) -> EpochPlan:
    """Of one epoch of a phase, both counted from 0."""
    return EpochPlan(source.rows, mix(config.seed, phase), epoch, config.data.streams, config.phases[phase].batch,
                     config.data.open_shards)


def training_stream(config: Config, source: ShardSource, plan: EpochPlan, streams: range, start_step: int = 0, *,
                    two_views: bool = False, pin: bool = False) -> EpochStream:
    """The plan's batches, augmented; `two_views` adds the strongly augmented one."""
    data = config.data
    augment = train_augment(data) if source.index.kind == "image" else None
    strong = Augment(data.image_size, **data.strong_augment.model_dump()) if two_views else None
    maker = SampleMaker(augment, plan.seed, plan.epoch, source.feature_width, strong)
    return EpochStream(source, plan, streams, maker, start_step=start_step, workers=data.workers,
                       prefetch=data.prefetch, pin=pin)


def train_augment(data: DataConfig) -> Augment:
    return Augment(data.image_size, **data.augment.model_dump())
