"""What a phase asks for its batches: the usual streams, or those of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream
from lacuna.trainer.cache.cost import check_cost
from lacuna.trainer.cache.stream import CachedStream
from lacuna.trainer.cache.views import Fixed, View, cache_url
from lacuna.trainer.config.sections import CacheConfig, Config
from lacuna.trainer.evaluate import eval_maker, eval_stream
from lacuna.trainer.methods.base import Needs
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.models.cuts import Cut, find_cut
from lacuna.trainer.models.parts import learning
from lacuna.trainer.on_device.decoding import device_decoder
from lacuna.trainer.training_data import strong_augment, train_augment, training_stream

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run

_VIEWS = 0x7A  # keeps the draws of views apart from those of a run with the same seed


class Streams(Protocol):
    """Where batches of a phase come from."""

    def training(self, plan: EpochPlan, start_step: int, epoch: int) -> EpochStream | CachedStream:
        """`epoch` counts over all phases."""

    def evaluation(self, source: ShardSource, plan: EpochPlan) -> EpochStream | CachedStream:
        """This rank's part of the plan, without random augmentation."""

    def spill(self) -> None:
        """Keep what is filled so far."""

    def describe(self) -> str:
        """Empty if there is nothing to say."""


class NoCache:
    """Every image is decoded, and goes through the whole classifier."""

    def __init__(self, run: Run):
        self.run = run

    def training(self, plan: EpochPlan, start_step: int, epoch: int) -> EpochStream:
        run, world = self.run, self.run.world
        return training_stream(run.config, run.sources["train"], plan, plan.rank_streams(world.rank, world.size),
                               start_step, two_views=run.method.needs().strong_view, pin=world.device.type == "cuda",
                               decoder=device_decoder(run.config.data, world.device))

    def evaluation(self, source: ShardSource, plan: EpochPlan) -> EpochStream:
        return eval_stream(source, plan, self.run.config, self.run.world)

    def spill(self) -> None: ...

    def describe(self) -> str:
        return ""


class Cache:
    """Of one phase. Validation, test and passes between epochs use the view of evaluation, which is kept too."""

    def __init__(self, run: Run, number: int, settings: CacheConfig):
        self.run, self.settings = run, settings
        assert run.model.cut is not None
        self.views = Views(run.config, fixed_part(run.model, run.config), settings, run.method.needs())
        self.open: CachedStream | None = None
        check_cost(run.config, number, self.views.all_of(run.sources, run.config.phases[number].epochs), run.world)

    def describe(self) -> str:
        fixed = self.views.fixed
        each = self.views.training(self.run.sources["train"], 0).row.itemsize / 1e3
        kept = f"{self.settings.views} random views" if self.settings.views else "one view"
        return (f"cached: {fixed.cut}, {' × '.join(map(str, fixed.shape))} numbers, {each:.1f} kB per sample and view; "
                f"{kept} of every sample in {cache_url(self.run.config)}")

    def training(self, plan: EpochPlan, start_step: int, epoch: int) -> CachedStream:
        self.open = self._stream(self.views.training(self.run.sources["train"], epoch), plan, start_step)
        return self.open

    def evaluation(self, source: ShardSource, plan: EpochPlan) -> CachedStream:
        return self._stream(self.views.evaluation(source), plan)

    def spill(self) -> None:
        if self.open is not None and not self.open.closed:
            self.open.spill()

    def _stream(self, view: View, plan: EpochPlan, start_step: int = 0) -> CachedStream:
        return CachedStream(view, self.run.model, self.run.config, self.run.world, plan, start_step)


class Views:
    """The looks that a phase takes at its samples."""

    def __init__(self, config: Config, fixed: Fixed, settings: CacheConfig, needs: Needs):
        self.config, self.fixed, self.settings = config, fixed, settings
        self.strong = strong_augment(config.data) if needs.strong_view else None
        # The training samples too are looked at as in evaluation.
        self.evaluated = config.model.head_norm != "none" or needs.scored_pass
        self.seed = mix(settings.seed, _VIEWS)

    def training(self, source: ShardSource, epoch: int) -> View:
        number = epoch % self.settings.views if self.settings.views else None
        augment = train_augment(self.config.data) if number is not None else self._evaluated
        maker = SampleMaker(augment, self.seed, number or 0, strong=self.strong)
        return View.of(self.config, self.fixed, source, maker, number, self.settings.seed)

    def evaluation(self, source: ShardSource) -> View:
        maker = eval_maker(self.config, source)
        return View.of(self.config, self.fixed, source, maker, None, self.settings.seed)

    def all_of(self, sources: dict[str, ShardSource], epochs: int) -> list[View]:
        """Everything that a phase of so many epochs may keep, each once."""
        found = [self.training(sources["train"], epoch) for epoch in range(min(epochs, self.settings.views or 1))]
        others = (*(("train",) if self.evaluated else ()), "val", "test", "held_out")
        found += [self.evaluation(sources[name]) for name in others if name in sources]
        return list({view.url: view for view in found}.values())

    @property
    def _evaluated(self) -> Augment:
        return Augment(self.config.data.image_size, crop=self.config.data.eval_crop)


def open_cache(run: Run, number: int) -> Streams:
    """Of the phase that begins, whose weights are those that it begins with."""
    settings = run.config.phases[number].cache
    run.cache = NoCache(run) if settings is None else Cache(run, number, settings)
    return run.cache


def cut_of(model: Classifier, config: Config, number: int, needs: Needs) -> Cut | None:
    """Where the phase cuts the classifier, if it has a cache."""
    phase, key = config.phases[number], f"phases.{number}.cache"
    if phase.cache is None:
        return None
    if config.model.backbone == "features":
        raise UserError(f"{key}: the shards hold feature vectors already. Leave it out.")
    name = config.method["name"]
    if needs.pixels:
        raise UserError(f"{key}: method {name!r} makes new images from those of a batch. Leave the cache out, or use "
                        "another method.")
    by_place = needs.maps or config.model.boost != 1 or config.model.head != "linear"
    shown = phase.trainable if isinstance(phase.trainable, str) else list(phase.trainable)
    parts = learning(model.names, phase.trainable)
    if model.stages is not None:
        if parts:
            raise UserError(f"{key} with trainable: {shown}: model.head = {config.model.head!r} also looks at the map "
                            f"before {model.stages.part}. Use trainable: head, or leave the cache out.")
        parts = learning(model.names, (model.stages.part,))  # the earlier map is kept, the last one made of it
    return find_cut(model.backbone, model.names, parts, by_place, config.data.image_size,
                    f"{key} with trainable: {shown}")


def fixed_part(model: Classifier, config: Config) -> Fixed:
    assert model.cut is not None
    size = config.data.image_size
    blank = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=model.mean.device)
    was_training = model.training
    model.eval()
    shape = tuple(model.before_cut(blank).shape[1:])
    model.train(was_training)
    return Fixed(model.cut.name, model.cut.digest(), shape)
