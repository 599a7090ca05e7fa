"""Shards as datasets for torch: through webdataset's own pipeline, or as the exact stream that training reads.

Legend: L classes, n samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import IterableDataset, get_worker_info

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.decode import decode_image, decode_vector
from lacuna.data_pipelines.shard_tables import Members
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.config.sections import Config
from lacuna.trainer.training_data import epoch_plan, training_source, training_stream

__all__ = ["ExactStream", "LabelledShards", "dataset", "stream"]

_INPUT = {"image": "image", "feature": "vector"}  # sample kind → the name of a sample's input
_MOST_ALONE = 1000  # shards whose order is shuffled together


class LabelledShards(wds.DataPipeline, wds.FluidInterface):
    """A webdataset pipeline (`map`, `shuffle`, `batched`, `to_tuple` … go on from here) that knows its labels."""

    def __init__(self, source: ShardSource, *stages: Any):
        super().__init__(*stages)
        self.source = source

    @property
    def classes(self) -> list[str]:
        return self.source.index.classes

    @property
    def samples(self) -> int:
        """In one epoch, over all ranks and workers."""
        return int(self.source.counts.sum())


def dataset(url: str, labels: str = "labels", *, subset: str | None = None, shuffle: int = 0, seed: int = 0,
            decode: str | Callable | None = "lacuna",
            handler: Callable[[Exception], bool] = wds.reraise_exception) -> LabelledShards:
    """Samples of a dataset folder with their labels: a torch IterableDataset made of webdataset's stages.

        data = lacuna.dataset("shards/train", labels="single", shuffle=1000)
        for sample in data:
            sample["image"]     # uint8 [3, H, W]; "vector" float32 [D] of feature shards
            sample["labels"]    # int8 [L]: 1 positive, 0 negative, -1 unknown
            sample["__key__"], sample["shard"], sample["row"]
        loader = torch.utils.data.DataLoader(data.map(to_224).to_tuple("image", "labels"), batch_size=64, num_workers=4)

    Whole shards are dealt to ranks and workers, so that every sample comes exactly once per epoch. `shuffle`: how many
    samples are mixed (0: tar order), with another order every epoch. `decode`: anything that webdataset's `decode`
    takes, such as "pil" or "torchrgb"; None leaves the bytes. `handler`: webdataset's, for samples that cannot be
    decoded (`wds.warn_and_continue`). The order depends on the number of workers: `lacuna.stream` does not.
    """
    source = ShardSource.load(url, labels, subset)
    urls = [source.index.shard_url(int(shard)) for shard in np.flatnonzero(source.counts)]
    if not urls:
        raise UserError(f"{url}: no samples take part. Check it{f' and the subset {subset!r}' if subset else ''}.")
    stages: list[Any] = [wds.SimpleShardList(urls), wds.split_by_node, wds.split_by_worker]
    if shuffle:
        stages.append(wds.detshuffle(_MOST_ALONE, seed=seed))
    stages += [_open_shards, wds.filters.pipelinefilter(wds.tariterators.tar_file_expander)(handler=handler),
               wds.filters.pipelinefilter(wds.tariterators.group_by_keys)(handler=handler), _Labels(source)]
    if shuffle:
        stages.append(wds.detshuffle(shuffle, initial=shuffle, seed=seed + 1))
    if decode is not None:
        stages.append(wds.decode(_decode if decode == "lacuna" else decode, handler=handler, partial=True))
    return LabelledShards(source, *stages, wds.map(_Named(_INPUT[source.index.kind])))


def _open_shards(shards: Iterable[dict]) -> Iterator[dict]:
    """In place of webdataset's opener, which wants a command-line tool per kind of storage."""
    for shard in shards:
        try:
            with storage.open_stream(shard["url"]) as stream:
                yield {"url": shard["url"], "stream": stream}
        except FileNotFoundError:
            raise UserError(f"{shard['url']}: this shard is in the index but not in the folder. Restore it, or rebuild "
                            "the index with `lacuna shards index`.") from None


class _Labels:
    """A stage: labels and place of every sample; samples outside the subset are left out."""

    def __init__(self, source: ShardSource):
        self.source = source
        self.numbers = {source.index.shard_url(s): s for s in range(len(source.index.shards))}

    def __call__(self, samples: Iterable[dict]) -> Iterator[dict]:
        open_shard, rows, used = -1, dict[str, int](), np.zeros(0, bool)
        for sample in samples:
            shard = self.numbers[sample["__url__"]]
            if shard != open_shard:
                members, labels = self.source.index.members(shard), self.source.sidecar.labels(shard)
                rows = {key: row for row, key in enumerate(members.keys)}
                used = (np.ones(len(rows), bool) if self.source.subset is None else self.source.subset.mask(shard))
                open_shard = shard
            row = rows.get(sample["__key__"].removeprefix("./"))
            if row is None:
                continue  # not a sample: other files may lie in tars that were made elsewhere
            if used[row]:
                yield self._labelled(sample, shard, row, members, labels)

    def _labelled(self, sample: dict, shard: int, row: int, members: Members, labels: Any) -> dict:
        dense = labels.dense(self.source.classes, np.array([row]))[0]
        return {**sample, "__input__": members.extensions[row].lower(), "labels": torch.from_numpy(dense),
                "shard": shard, "row": row}


class _Named:
    """The last stage: the input under one name, whatever its file's extension is."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, sample: dict) -> dict:
        kept = {key: value for key, value in sample.items() if key not in ("__input__", sample["__input__"])}
        return {**kept, self.name: sample[sample["__input__"]]}


def _decode(key: str, data: bytes) -> Any:
    """For webdataset's `decode`: images as training sees them before augmentation; other files it decodes itself."""
    extension = key.rpartition(".")[2]
    if extension == "npy":
        return torch.from_numpy(decode_vector(data))
    return decode_image(data).contiguous() if extension in ("jpg", "jpeg", "png", "webp") else None


class ExactStream(IterableDataset[Batch]):
    """One epoch's batches; iterate as often as you like."""

    def __init__(self, config: Config, source: ShardSource, phase: int, epoch: int, rank: int, world: int,
                 start_step: int, two_views: bool):
        super().__init__()
        self.config, self.source, self.two_views = config, source, two_views
        self.plan = epoch_plan(config, source, phase, epoch)
        self.rank, self.world, self.start_step = rank, world, start_step
        self.plan.rank_streams(rank, world)  # refuses numbers that do not fit

    def __len__(self) -> int:
        """Steps that are left; with DataLoader workers, every worker gives so many parts."""
        return self.plan.steps - self.start_step

    def __iter__(self) -> Iterator[Batch]:
        rank, world = self.rank, self.world
        if worker := get_worker_info():  # a worker is a rank of its own
            rank, world = rank * worker.num_workers + worker.id, world * worker.num_workers
        streams = self.plan.rank_streams(rank, world)
        with training_stream(self.config, self.source, self.plan, streams, self.start_step,
                             two_views=self.two_views) as batches:
            yield from batches


def stream(config: Config, *, phase: int = 0, epoch: int = 0, rank: int = 0, world: int = 1, start_step: int = 0,
           two_views: bool = False) -> ExactStream:
    """The batches that training with this config reads: the same samples, crops and order, on any number of ranks.

        config = lacuna.load_config("demo")
        for batch in lacuna.stream(config, phase=0, epoch=2):
            batch.inputs    # uint8 [n, 3, H, W], augmented; float32 [n, D] of feature shards
            batch.labels    # int8 [n, L]
            batch.shards, batch.rows, batch.boxes, batch.flips

    Rank `rank` of `world` gets its part of every global batch; `start_step` resumes inside an epoch. Decoding runs in
    `data.workers` threads; inside a DataLoader (`batch_size=None`) each of its workers takes whole streams.
    `two_views` adds `batch.strong`, the second view that some methods use.
    """
    if not 0 <= phase < len(config.phases) or not 0 <= epoch < config.phases[phase].epochs:
        epochs = [p.epochs for p in config.phases]
        raise UserError(f"phase {phase}, epoch {epoch}: the config has phases 0..{len(epochs) - 1} with {epochs} "
                        "epochs, both counted from 0.")
    if not 0 <= rank < world:
        raise UserError(f"rank {rank} of world {world}: ranks are 0..{world - 1}.")
    return ExactStream(config, training_source(config), phase, epoch, rank, world, start_step, two_views)
