"""A dataset of any number of samples that takes the disk of a few shards: the others are links to them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lacuna.data_pipelines.index import ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import Dataset, Sample
from lacuna.tools.bench.noise_pictures import Noise

_DISTINCT = 8  # shards with bytes of their own
WIDTH = 32


def vectors(count: int) -> list[Sample]:
    return [Sample(f"vector-{i:07d}", _Vector(i), "npy") for i in range(count)]


def wide_vectors(count: int) -> list[Sample]:
    return [Sample(f"vector-{i:07d}", _Vector(i, 512), "npy") for i in range(count)]


def pictures(count: int) -> list[Sample]:
    return [Sample(f"picture-{i:07d}", Noise(i, 64), "jpg") for i in range(count)]


def make_linked(folder: str, base: str, shards: int, rows: int, classes: int,
                contents: Callable[[int], list[Sample]] = vectors) -> None:
    """`shards` × `rows` samples with one known label each, in `folder`; `base` holds the distinct ones."""
    if not os.path.exists(base):
        count = _DISTINCT * rows
        labels = SparseLabels.from_lists([[i % classes] for i in range(count)], [[]] * count, UNKNOWN)
        kind = "image" if contents is pictures else "feature"
        pack(Dataset([str(c) for c in range(classes)], contents(count), labels, "train", kind=kind), base,
             Layout(streams=1, rows_per_shard=rows))
    first = ShardIndex.load(base)
    sidecar = Sidecar.load(first, "labels")
    os.makedirs(os.path.join(folder, "members"))
    listed = []
    for number in range(shards):
        like = first.shards[number % len(first.shards)]
        name = f"shard-{number:05d}"
        os.link(os.path.join(base, like.name), os.path.join(folder, name + ".tar"))
        os.link(os.path.join(base, "members", like.stem + ".npz"), os.path.join(folder, "members", name + ".npz"))
        listed.append(type(like)(name + ".tar", like.count, like.bytes))
    index = ShardIndex(folder, first.classes, listed, first.split, first.kind, first.class_ids)
    index.save()
    writer = SidecarWriter(index, "labels", sidecar.unlisted, {})
    labels_of = [sidecar.labels(number) for number in range(len(first.shards))]
    for number in range(shards):
        writer.write(number, labels_of[number % len(labels_of)])
    writer.close()


@dataclass(frozen=True)
class _Vector:
    seed: int
    width: int = WIDTH

    def read(self) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.random.default_rng(self.seed).standard_normal(self.width).astype(np.float32))
        return buffer.getvalue()
