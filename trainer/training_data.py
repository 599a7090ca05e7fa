"""Which training samples come when, and how they are made: an epoch's plan and its stream, from the config alone."""

from __future__ import annotations

import numpy as np

from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.device_decoder import DeviceDecoder
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream
from lacuna.data_pipelines.subsets import Subset
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import Config

_HELD_OUT = 0x6865_6C64  # a draw apart from the run's others


def training_source(config: Config) -> ShardSource:
    """What the run trains on: data.train without what it holds out."""
    split = config.data.train
    return without_held_out(config, ShardSource.load(split.url, split.labels, split.subset, config.data.scratch))[0]


def without_held_out(config: Config, train: ShardSource) -> tuple[ShardSource, ShardSource | None]:
    """(what is trained on, what is held out). The draw is a hash of (seed, shard, row): the same for every launch."""
    share = config.data.hold_out
    if not share or config.data.val is not None:
        return train, None
    seed, complete = mix(config.seed, _HELD_OUT), _complete_rows(config, train)
    ours, others = [], []
    for shard, rows in enumerate(train.index.counts.tolist()):
        there = np.ones(rows, bool) if train.subset is None else train.subset.mask(shard)
        drawn = uniform_array(mix(seed, shard), np.arange(rows)) < share
        if complete is not None:
            drawn &= ~complete.mask(shard)
        if (there & drawn).any():  # a sample without a known positive could not be judged
            drawn &= np.diff(train.sidecar.labels(shard).pos_ptr) > 0
        ours.append(there & ~drawn)
        others.append(there & drawn)
    if not any(mask.any() for mask in others) or not any(mask.any() for mask in ours):
        return train, None
    name = train.subset.name if train.subset else "all"

    def part(masks: list[np.ndarray], what: str) -> ShardSource:
        subset = Subset.from_masks(train.index, f"{name}, {what}", masks, {"hold_out": share, "seed": config.seed})
        return ShardSource(train.index, train.sidecar, subset, train.scratch)

    return part(ours, "not held out"), part(others, "held out")


def _complete_rows(config: Config, train: ShardSource) -> Subset | None:
    """Rows of the same tars that are fully labelled: they are worth more in training."""
    split = config.data.fully_labelled
    if split is None or split.subset is None or split.url != config.data.train.url:
        return None
    return Subset.load(train.index, split.subset)


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
