"""From a config to everything a run needs: sources, model, method, log, checkpoints; checks that span sections."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.checkpoints.checkpoint import Checkpoints
from lacuna.trainer.config.data_section import SplitConfig
from lacuna.trainer.config.sections import Config
from lacuna.trainer.evaluate import make_bf16_safe
from lacuna.trainer.fully_labelled import check_fully_labelled
from lacuna.trainer.grouping import groups_fingerprint, with_groups
from lacuna.trainer.head_decay import check_head_decay
from lacuna.trainer.head_start import start_bias, start_weights
from lacuna.trainer.loggers import check_loggers
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Method, Task
from lacuna.trainer.mixing import check_mixing
from lacuna.trainer.models.classifier import Classifier, build_model, spatial_side
from lacuna.trainer.models.parts import check_parts
from lacuna.trainer.neighbors import data_fingerprints
from lacuna.trainer.run_folder import RunFolder
from lacuna.trainer.run_log import RunLog
from lacuna.trainer.training_data import train_augment, without_held_out
from lacuna.trainer.whole_run import Run, Stop
from lacuna.trainer.world import Watchdog, World

log = logging.getLogger("lacuna")


def build_run(config: Config, world: World, watchdog: Watchdog, stop: Stop | None = None) -> Run:
    bf16 = make_bf16_safe(config, world)  # oneDNN reads its settings once, at the model's first operation
    check_loggers(config)
    sources = load_sources(config)
    check_fully_labelled(config, sources)
    if config.train.fully_labelled_weight:
        mean_positives(sources)  # refuses labels that are not complete
    train = sources["train"]
    model = place_model(config, train, world)
    task = task_of(config, sources, model)
    start_weights(model, config.model, task)
    start_bias(model, config.model, task, world.main)
    method = with_groups(build_method(config.method, task), config, train)
    model.extra = (extra := method.module()) and extra.to(world.device)
    check_method(config, method)
    check_mixing(config, method, train.index.kind == "image")
    watchdog.beat("model built", building=True)
    folder = RunFolder(config.folder, world, config.train.staging)
    run_log = RunLog(config, folder, world.main)
    if bf16:
        log.info(bf16)
    fingerprints = {"config": config.fingerprint(), **_fingerprints(sources), **groups_fingerprint(config, train)}
    state_url = (config.train.state_url or storage.join(config.folder, "state")) if method.fields() else None
    checkpoints = Checkpoints(folder, world, config.train.keep, fingerprints,
                              [phase.epochs for phase in config.phases], state_url)
    return Run(config, world, sources, model, method, run_log, checkpoints, watchdog, stop or Stop())


def check_method(config: Config, method: Method) -> None:
    """Refuse augmentations that move what a method compares, and phases in which it could do nothing."""
    check_head_decay(config)
    needs = method.needs()
    name, strong = config.method["name"], config.data.strong_augment
    if needs.maps and train_augment(config.data).moves_pixels_unrecorded:
        raise UserError(f"data.augment.randaugment = {config.data.augment.randaugment} moves pixels in ways that "
                        f"heatmaps cannot follow. Set it to 0, or use another method than {name!r}.")
    if needs.same_crop and (strong.crop != "same" or strong.randaugment):
        raise UserError(f"data.strong_augment = {{crop: {strong.crop}, randaugment: {strong.randaugment}, …}}, but "
                        f"method {name!r} compares the same places of both views. Write data.strong_augment="
                        "{crop: same, randaugment: 0, color_jitter: [0.8, 0.8, 0.8, 0.2]}.")
    if needs.backbone and all(phase.trainable == "head" for phase in config.phases):
        raise UserError(f"phases: only the head learns (trainable: head), but what method {name!r} adds reaches it "
                        "through the backbone alone. Train parts of that, as in phases.0.trainable=[layer4], or all.")


def _fingerprints(sources: dict[str, ShardSource]) -> dict[str, str]:
    """What a checkpoint depends on besides the config; the test set is looked at only afterwards."""
    found = {}
    for name in ("train", "val", "fully_labelled"):
        if name in sources:
            source = sources[name]
            found[f"data.{name} shard index"] = source.index.fingerprint
            found[f"data.{name} label sidecar"] = source.sidecar.fingerprint
            found[f"data.{name} subset"] = source.subset.fingerprint if source.subset else "all rows"
    return found


def load_sources(config: Config) -> dict[str, ShardSource]:
    splits: dict[str, SplitConfig | None] = {"train": config.data.train, "val": config.data.val,
                                             "test": config.data.test, "fully_labelled": config.data.fully_labelled}
    sources = {name: ShardSource.load(split.url, split.labels, split.subset, config.data.scratch)
               for name, split in splits.items() if split is not None}
    train = sources["train"]
    for name, source in sources.items():
        if not source.counts.sum():
            raise UserError(f"data.{name} = {source.index.url}: no samples take part. Check its url and subset.")
        if source.index.classes != train.index.classes:
            raise UserError(f"data.{name}.url = {source.index.url} has {source.classes} classes, data.train has "
                            f"{train.classes}, or in another order: both need the same class list.")
        if source.index.kind != train.index.kind:
            raise UserError(f"data.{name} holds {source.index.kind}s, data.train holds {train.index.kind}s.")
    sources["train"], held_out = without_held_out(config, train)
    return sources if held_out is None else {**sources, "held_out": held_out}


def task_of(config: Config, sources: dict[str, ShardSource], model: Classifier) -> Task:
    grid = spatial_side(model, config.data.image_size) if sources["train"].index.kind == "image" else 0
    return replace(task_on(config, sources, grid, model.width, model.blank), class_width=model.class_width,
                   has_maps=model.has_maps, draws=model.draws, vector_width=model.vector_width)


def task_on(config: Config, sources: dict[str, ShardSource], grid: int, width: int,
            blank: tuple[int, int, int] = (0, 0, 0)) -> Task:
    """Counts are exact for a subset too: its shards' labels are counted once."""
    train = sources["train"]
    positives, negatives = train.sidecar.positives, train.sidecar.negatives
    if train.subset is not None:
        positives, negatives = train.subset_counts()
    return Task(train.classes, int(train.counts.sum()), positives, negatives, train.sidecar.unlisted == NEGATIVE, grid,
                config.model.expected_positives or mean_positives(sources), config.seed, width,
                tuple(train.index.classes), tuple(train.index.class_ids), blank, data_fingerprints(train))


def mean_positives(sources: dict[str, ShardSource]) -> float | None:
    """Of fully labelled images: the estimate of K that needs no oracle over the training set."""
    name = "fully_labelled" if "fully_labelled" in sources else "val"
    if name not in sources:
        return None
    source = sources[name]
    sidecar, samples = source.sidecar, int(source.counts.sum())
    positives, negatives = (sidecar.positives, sidecar.negatives) if source.subset is None else source.subset_counts()
    if (positives + negatives != samples).any():
        if name == "val":
            return None
        unknown = samples * source.classes - int(positives.sum() + negatives.sum())
        raise UserError(f"data.fully_labelled: {unknown:,} of the {samples:,} × {source.classes} labels in the sidecar "
                        f"{sidecar.name!r} are unknown. Name a subset whose rows are complete, or a sidecar of full "
                        "labels.")
    return float(positives.sum() / samples)


def place_model(config: Config, train: ShardSource, world: World) -> Classifier:
    torch.manual_seed(mix(config.seed, 0))  # every rank draws the same head
    model = build_model(config.model, config.data, train.classes, train.feature_width)
    for number, phase in enumerate(config.phases):
        check_parts(model.backbone, model.names, phase.trainable, f"phases.{number}.trainable", config.model.backbone)
    if config.model.batchnorm == "sync":
        if world.device.type != "cuda":
            raise UserError("model.batchnorm = 'sync' works on GPUs only. Use 'frozen' (or 'local') here.")
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model = model.to(world.device)
    if config.train.compile:
        model.compile()
    return model
