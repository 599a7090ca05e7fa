"""Shards with exactly given numbers of samples and contents."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from lacuna.data_pipelines.index import Shard, ShardIndex, SidecarWriter
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.shard_tables import Members
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.tar_writer import TarWriter

CLASSES = 5


def image_bytes(shard: int, row: int) -> bytes:
    """A small PNG of its own for every sample."""
    pixels = np.random.default_rng([shard, row]).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def row_labels(shard: int, row: int) -> tuple[list[int], list[int]]:
    return [(shard + row) % CLASSES], [(shard + row + 1) % CLASSES] if row % 3 == 0 else []


def write_shards(folder: Path, counts: list[int], contents=image_bytes, kind: str = "image",
                 name=lambda shard, row: f"{shard}/{row}") -> ShardSource:
    """Shards with exactly these numbers of samples: packing would never make such odd ones."""
    shards = []
    (folder / "members").mkdir(parents=True)
    extension = "png" if kind == "image" else "npy"
    for number, count in enumerate(counts):
        data = [contents(number, row) for row in range(count)]
        with open(folder / f"shard-{number:05d}.tar", "wb") as file:
            tar = TarWriter(file)
            offsets = [tar.add(f"{name(number, row)}.{extension}", body) for row, body in enumerate(data)]
            shards.append(Shard(f"shard-{number:05d}.tar", count, tar.close()))
        members = Members([name(number, row) for row in range(count)], [extension] * count,
                          np.array(offsets, np.int64), np.array([len(body) for body in data], np.int64),
                          np.arange(count))
        (folder / "members" / f"shard-{number:05d}.npz").write_bytes(members.to_bytes())
    index = ShardIndex(str(folder), [f"class {c}" for c in range(CLASSES)], shards, kind=kind)
    index.save()
    writer = SidecarWriter(index, "labels", UNKNOWN, {})
    for number, count in enumerate(counts):
        pairs = [row_labels(number, row) for row in range(count)]
        writer.write(number, SparseLabels.from_lists([p for p, _ in pairs], [n for _, n in pairs]))
    writer.close()
    return ShardSource.load(str(folder), "labels", None)
