"""Which training samples come when, and how they are made: an epoch's plan and its stream, from the config alone."""

from __future__ import annotations

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.device_decoder import DeviceDecoder
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream, SampleMaker
from lacuna.trainer.config.sections import Config, DataConfig


def epoch_plan(config: Config, source: ShardSource, phase: int, epoch: int) -> EpochPlan:
    """Of one epoch of a phase, both counted from 0."""
    return EpochPlan(source.counts, mix(config.seed, phase), epoch, config.data.streams, config.phases[phase].batch,
                     config.data.open_shards)


def phase_steps(config: Config, source: ShardSource) -> list[int]:
    """Steps of every phase, if all of its epochs are as long as the first one (they differ by a few)."""
    return [epoch_plan(config, source, number, 0).steps * phase.epochs for number, phase in enumerate(config.phases)]


def training_stream(config: Config, source: ShardSource, plan: EpochPlan, streams: range, start_step: int = 0, *,
                    two_views: bool = False, pin: bool = False, decoder: DeviceDecoder | None = None) -> EpochStream:
    """The plan's batches, augmented; `two_views` adds the strongly augmented one."""
    data = config.data
    maker = training_maker(config, source, plan.seed, plan.epoch, two_views, decoder)
    return EpochStream(source, plan, streams, maker, start_step=start_step, workers=data.workers,
                       prefetch=data.prefetch, pin=pin)


def training_maker(config: Config, source: ShardSource, seed: int, epoch: int, two_views: bool = False,
                   decoder: DeviceDecoder | None = None) -> SampleMaker:
    data = config.data
    augment = train_augment(data) if source.index.kind == "image" else None
    strong = strong_augment(data) if two_views else None
    return SampleMaker(augment, seed, epoch, source.feature_width, strong, decoder)


def train_augment(data: DataConfig) -> Augment:
    return Augment(data.image_size, **data.augment.model_dump())


def strong_augment(data: DataConfig) -> Augment:
    """Of the second view."""
    return Augment(data.image_size, **data.strong_augment.model_dump())
