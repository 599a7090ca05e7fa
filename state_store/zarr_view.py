"""A snapshot as a live Zarr group for outside readers: keys are served from the store's objects, nothing is copied.

A chunk object already holds the bytes that Zarr would have written; a chunk that was never written is made of its
initial values when it is asked for. Only this module imports zarr-python, so that training does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from lacuna.basics.errors import UserError
from lacuna.state_store.chunks import DamagedChunk, encode_padded, read_object, zarr_key
from lacuna.state_store.fields import Field
from lacuna.state_store.store import SnapshotReader

_GROUP = "zarr.json"
_Buffers = list[Buffer | None]  # inside the store `list` is a method


class SnapshotObjects(Mapping[str, bytes]):
    """Zarr key → bytes of one snapshot; only looking a key up reads anything."""

    def __init__(self, reader: SnapshotReader, snapshot: str):
        self.reader, self.snapshot = reader, snapshot
        self.number = reader.store.entry(snapshot).number

    def __getitem__(self, key: str) -> bytes:
        schema = self.reader.schema
        if key == _GROUP:
            return schema.group_json()
        field = schema.fields.get(key.partition("/")[0])
        if field is not None and key == f"{field.name}/{_GROUP}":
            return schema.readable_array_json(field)
        shard = self._shard(field, key)
        if field is None or shard is None:
            raise KeyError(key)
        ref = self.reader.refs.get(field.name, {}).get(shard)
        if ref is None:
            return encode_padded(field, self.reader.read_shard(field.name, shard), schema.max_rows)
        try:
            data = read_object(self.reader.store.url, field, shard, ref)
        except DamagedChunk:
            self._check_alive()
            raise
        if len(data) != ref.size:
            raise DamagedChunk("truncated", key, field.name, shard, f"{len(data)} bytes, {ref.size} were written")
        return data

    def __contains__(self, key: object) -> bool:
        fields = self.reader.schema.fields
        field = fields.get(str(key).partition("/")[0])
        return key == _GROUP or (field is not None and (key == f"{field.name}/{_GROUP}"
                                                        or self._shard(field, str(key)) is not None))

    def __iter__(self) -> Iterator[str]:
        schema = self.reader.schema
        yield _GROUP
        for field in schema.fields.values():
            yield f"{field.name}/{_GROUP}"
            yield from (zarr_key(field, shard) for shard in range(schema.shards))

    def __len__(self) -> int:
        schema = self.reader.schema
        return 1 + len(schema.fields) * (1 + schema.shards)

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, SnapshotObjects) and self.number == other.number
                and self.reader.store.url == other.reader.store.url)

    def __hash__(self) -> int:
        return hash((self.reader.store.url, self.number))

    def __repr__(self) -> str:
        return f"{self.reader.store.url}@{self.snapshot}"

    def _shard(self, field: Field | None, key: str) -> int | None:
        """Which shard's chunk a key names, if it is written as Zarr writes it."""
        parts = key.split("/")
        if field is None or len(parts) < 3 or not parts[2].isdecimal():
            return None
        shard = int(parts[2])
        return shard if shard < self.reader.schema.shards and key == zarr_key(field, shard) else None

    def _check_alive(self) -> None:
        """Training deletes old snapshots: that is no damage, and there are newer ones."""
        store = self.reader.store
        if all(entry.number != self.number for entry in store.snapshots()):
            names = [entry.name for entry in store.snapshots()]
            raise UserError(f"{store.url}: snapshot {self.snapshot!r} was deleted while it was being read (a run keeps "
                            f"the last train.keep ones); there are {names or 'none'} now. Open it again.") from None


class ReadOnlyStore(Store):
    """A Zarr store over any mapping of keys to bytes."""

    supports_writes = supports_deletes = supports_partial_writes = False
    supports_listing = True

    def __init__(self, objects: Mapping[str, bytes], *, read_only: bool = True):
        if not read_only:
            raise ValueError("this store cannot be written to: a snapshot never changes")
        super().__init__(read_only=True)
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReadOnlyStore) and self.objects == other.objects

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ReadOnlyStore({self.objects!r})"

    def get_sync(self, key: str, *, prototype: BufferPrototype | None = None,
                 byte_range: ByteRequest | None = None) -> Buffer | None:
        if key not in self.objects:
            return None
        data = self.objects[key][_span(byte_range)]
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get(self, key: str, prototype: BufferPrototype | None = None,
                  byte_range: ByteRequest | None = None) -> Buffer | None:
        # In a thread, so that zarr and dask have several chunks on their way at a time.
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype, byte_range=byte_range)

    async def get_partial_values(self, prototype: BufferPrototype,
                                 key_ranges: Iterable[tuple[str, ByteRequest | None]]) -> _Buffers:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return key in self.objects

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        for key in list(self.objects):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in list(self.objects):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        folder = f"{prefix.strip('/')}/".lstrip("/")
        seen = {key[len(folder) :].split("/", 1)[0] for key in self.objects if key.startswith(folder)}
        for name in sorted(seen):
            yield name


def open_group(reader: SnapshotReader, snapshot: str) -> zarr.Group:
    """Arrays (shards, rows of the longest shard, *stored shape) of stored values, read chunk by chunk when used."""
    return zarr.open_group(store=ReadOnlyStore(SnapshotObjects(reader, snapshot)), mode="r")


def _span(byte_range: Any) -> slice:
    match byte_range:
        case None:
            return slice(None)
        case RangeByteRequest():
            return slice(byte_range.start, byte_range.end)
        case OffsetByteRequest():
            return slice(byte_range.offset, None)
        case SuffixByteRequest():
            return slice(-byte_range.suffix, None) if byte_range.suffix else slice(0, 0)
    raise ValueError(f"Unexpected byte_range, got {byte_range}.")
