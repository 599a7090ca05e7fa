"""Other people's stores for the same per-sample fields, each behind three calls: read a shard, write one, snapshot.

All have one chunk per field and shard and the codec of our fields, and write without fsync until a snapshot, which
makes everything durable. zarr, zarrs and tensorstore have no snapshots of their own: theirs is a second folder, of hard
links where chunk files are replaced, and of copies for zarrs, which writes into them. icechunk commits. memmap has
neither codec nor snapshots: its snapshot only flushes, which is less work; it is reported, not counted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from lacuna.state_store import Field

Shard = dict[str, np.ndarray]  # by field


class ZarrFolder:
    """zarr-python on a local folder; with `zarrs` its codec pipeline is the one written in Rust."""

    pipeline = "zarr.core.codec_pipeline.BatchedCodecPipeline"

    def __init__(self, folder: str, fields: Sequence[Field], shards: int, rows: int):
        import zarr

        zarr.config.set({"codec_pipeline.path": self.pipeline})
        self.folder, self.fields = folder, fields
        new = not os.path.exists(folder)
        group = zarr.open_group(self._store(new), mode="a" if new else "r+")
        self.arrays: dict[str, Any] = {f.name: _array(group, f, shards, rows, new) for f in fields}

    def _store(self, new: bool) -> Any:
        return self.folder

    def read(self, shard: int) -> Shard:
        return {name: array[shard] for name, array in self.arrays.items()}

    def write(self, shard: int, values: Shard) -> None:
        for name, array in self.arrays.items():
            array[shard] = values[name]

    def snapshot(self, name: str) -> None:
        duplicate_durably(self.folder, f"{self.folder}-{name}", os.link)

    def reopened(self, name: str | None) -> Callable[[int], Shard]:
        """How a new process reads a snapshot (None: what is there now)."""
        shards, rows = next(iter(self.arrays.values())).shape[:2]
        return type(self)(self.folder + (f"-{name}" if name else ""), self.fields, shards, rows).read


class ZarrsFolder(ZarrFolder):
    pipeline = "zarrs.ZarrsCodecPipeline"

    def __init__(self, folder: str, fields: Sequence[Field], shards: int, rows: int):
        import zarrs  # noqa: F401  registers the pipeline's options

        super().__init__(folder, fields, shards, rows)

    def snapshot(self, name: str) -> None:
        duplicate_durably(self.folder, f"{self.folder}-{name}", shutil.copyfile)


class IcechunkRepository(ZarrFolder):
    def _store(self, new: bool) -> Any:
        import icechunk

        storage = icechunk.local_filesystem_storage(self.folder)
        self.repository = (icechunk.Repository.create if new else icechunk.Repository.open)(storage)
        self.session = self.repository.writable_session("main")
        return self.session.store

    def snapshot(self, name: str) -> None:
        import zarr

        self.repository.create_tag(name, self.session.commit(name))
        self.session = self.repository.writable_session("main")
        group = zarr.open_group(self.session.store, mode="r+")
        self.arrays = {field.name: group[field.name] for field in self.fields}

    def reopened(self, name: str | None) -> Callable[[int], Shard]:
        import icechunk
        import zarr

        repository = icechunk.Repository.open(icechunk.local_filesystem_storage(self.folder))
        session = repository.readonly_session(tag=name) if name else repository.readonly_session("main")
        group: Any = zarr.open_group(session.store, mode="r")
        return lambda shard: {field.name: group[field.name][shard] for field in self.fields}


class TensorstoreFolder(ZarrFolder):
    """The same folder as zarr's, through tensorstore; all fields of a shard in flight at once."""

    def __init__(self, folder: str, fields: Sequence[Field], shards: int, rows: int):
        import tensorstore as ts

        super().__init__(folder, fields, shards, rows)
        context = ts.Context({"file_io_sync": False, "cache_pool": {"total_bytes_limit": 0}})
        self.opened = {f.name: ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/{f.name}/"},
                                       context=context).result() for f in fields}

    def read(self, shard: int) -> Shard:
        waiting = {name: array[shard].read() for name, array in self.opened.items()}
        return {name: future.result() for name, future in waiting.items()}

    def write(self, shard: int, values: Shard) -> None:
        for future in [array[shard].write(values[name]) for name, array in self.opened.items()]:
            future.result()


class Memmap:
    def __init__(self, folder: str, fields: Sequence[Field], shards: int, rows: int):
        self.folder, self.fields, self.shape = folder, fields, (shards, rows)
        mode: Literal["r+", "w+"] = "r+" if os.path.exists(folder) else "w+"
        os.makedirs(folder, exist_ok=True)
        self.arrays: dict[str, Any] = {
            f.name: np.memmap(f"{folder}/{f.name}", f.stored_dtype, mode, shape=(shards, rows, *f.stored_shape))
            for f in fields}

    def read(self, shard: int) -> Shard:
        return {name: np.array(array[shard]) for name, array in self.arrays.items()}

    def write(self, shard: int, values: Shard) -> None:
        for name, array in self.arrays.items():
            array[shard] = values[name]

    def snapshot(self, name: str) -> None:
        for array in self.arrays.values():
            array.flush()

    def reopened(self, name: str | None) -> Callable[[int], Shard]:
        return type(self)(self.folder, self.fields, *self.shape).read


def _array(group: Any, field: Field, shards: int, rows: int, new: bool) -> Any:
    from zarr.codecs import BloscCodec, Crc32cCodec

    if not new:
        return group[field.name]
    compression: Any = field.compression or "lz4"
    blosc = [] if compression == "none" else [BloscCodec(cname=compression, clevel=5 if compression == "lz4" else 1,
                                                         shuffle="bitshuffle", typesize=field.stored_dtype.itemsize)]
    return group.create_array(field.name, shape=(shards, rows, *field.stored_shape), dtype=field.stored_dtype,
                              chunks=(1, rows, *field.stored_shape), compressors=[*blosc, Crc32cCodec()])


def duplicate_durably(folder: str, target: str, put: Callable[[str, str], object]) -> None:
    """A second folder with the same files, all of them on the disk."""
    for where, _, names in os.walk(folder):
        there = os.path.join(target, os.path.relpath(where, folder))
        os.makedirs(there, exist_ok=True)
        for name in names:
            put(os.path.join(where, name), os.path.join(there, name))
            descriptor = os.open(os.path.join(there, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


STORES: dict[str, tuple[str, Callable[..., Any]]] = {
    "zarr": ("zarr", ZarrFolder), "zarrs": ("zarrs", ZarrsFolder), "tensorstore": ("tensorstore", TensorstoreFolder),
    "icechunk": ("icechunk", IcechunkRepository), "memmap": ("numpy", Memmap)}
