"""Export of a snapshot: plain Zarr for outside readers, rows by sample key as Parquet or npz, and back again."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.npy_header import unpacked
from lacuna.state_store import chunks
from lacuna.state_store.chunks import zarr_key
from lacuna.state_store.fields import Constant, Field
from lacuna.state_store.moving import Batch, BulkWriter, Keys, KeyTable, move_rows
from lacuna.state_store.store import Initials, SnapshotReader, StateStore
from lacuna.state_store.sweep import map_shards

FORMATS = ("parquet", "npz")


def zarr_copy(reader: SnapshotReader, url: str) -> int:
    """A plain Zarr v3 group with every chunk in place, never-written ones with their initial values; returns chunks.

    Rows beyond a shard's own (the array is as long as the longest shard) have no meaning.
    """
    if storage.exists(storage.join(url, "zarr.json")):
        raise UserError(f"{url}: there is already a Zarr group. Choose another URL.")
    schema, count = reader.schema, 0
    for spec in schema.fields.values():
        storage.write_atomic(storage.join(url, spec.name, "zarr.json"), schema.readable_array_json(spec))

        def copy(shard: int, rows: dict[str, np.ndarray], spec: Field = spec) -> None:
            storage.write_atomic(storage.join(url, zarr_key(spec, shard)),
                                 chunks.encode_padded(spec, rows[spec.name], schema.max_rows), durable=False)

        count += sum(1 for _ in map_shards(reader, [spec.name], copy))
    storage.write_atomic(storage.join(url, "zarr.json"), schema.group_json())
    return count


def reference_copy(reader: SnapshotReader, url: str) -> int:
    """A reference manifest (fsspec's `reference://`): outside readers see the snapshot in place, nothing is copied.

    Chunks that were never written are the fill value, so fields with drawn or given initial values must be written.
    """
    schema, store = reader.schema, reader.store.url
    refs: dict[str, object] = {"zarr.json": schema.group_json().decode()}
    for spec in schema.fields.values():
        refs[f"{spec.name}/zarr.json"] = schema.readable_array_json(spec).decode()
        written = reader.refs.get(spec.name, {})
        for shard in range(schema.shards):
            if shard in written:
                refs[zarr_key(spec, shard)] = [chunks.chunk_url(store, spec.name, shard, written[shard].token)]
            elif not isinstance(spec.initial, Constant):
                body = chunks.encode_padded(spec, reader.read_shard(spec.name, shard), schema.max_rows)
                refs[zarr_key(spec, shard)] = "base64:" + base64.b64encode(body).decode()
    storage.write_atomic(url, json.dumps({"version": 1, "refs": refs}).encode())
    return len(refs)


def row_copies(reader: SnapshotReader, keys: Keys, url: str, kind: str = "parquet",
                fields: Sequence[str] | None = None) -> int:
    """One file a shard with the sample key and each field's values (floats, booleans, integers); returns rows."""
    if kind not in FORMATS:
        raise UserError(f"export format {kind!r}; legal: {', '.join(FORMATS)}.")
    names = [_known(reader, name) for name in fields] if fields else list(reader.schema.fields)

    def write(shard: int, rows: dict[str, np.ndarray]) -> int:
        samples = list(keys(shard))
        if len(samples) != int(reader.schema.counts[shard]):
            raise UserError(f"shard {shard}: {len(samples)} sample keys for {int(reader.schema.counts[shard])} rows of "
                            "state. Pass the index that the state was made with.")
        values = {name: reader.schema.fields[name].decode(stored) for name, stored in rows.items()}
        data = _parquet(samples, values, reader) if kind == "parquet" else _npz(samples, values)
        storage.write_atomic(storage.join(url, f"shard-{shard:06d}.{kind}"), data, durable=False)
        return len(samples)

    return sum(map_shards(reader, names, write))


def import_rows(store: StateStore, snapshot: str | None, url: str, keys: Keys, name: str, budget: int = 1 << 30,
                initials: Initials | None = None) -> tuple[int, int]:
    """Commit snapshot `name`: rows of exported files replace those of `snapshot` (None: initial values), by key.

    Returns (rows replaced, rows of the files that the store has no place for).
    """
    files = [f for f in storage.list_names(url) if PurePosixPath(f).suffix[1:] in FORMATS]
    if not files:
        raise UserError(f"{url}: no .parquet or .npz files to import.")
    refs = store.manifest(snapshot).refs if snapshot is not None else {}
    writer = BulkWriter(store, refs)
    source = _Files(store, [storage.join(url, f) for f in files])
    table, base = KeyTable(keys, store.schema.shards), SnapshotReader(store, refs, initials)
    counts = move_rows(source, table, writer, base, budget)
    writer.commit(name)
    return counts


class _Files:
    """Reads exported files one at a time, as often as it is asked."""

    def __init__(self, store: StateStore, urls: list[str]):
        self.store, self.urls = store, urls

    def __call__(self) -> Iterator[Batch]:
        for url in self.urls:
            keys, values = (_read_parquet if url.endswith("parquet") else _read_npz)(storage.read_bytes(url), url)
            encoded = {}
            for name, array in values.items():
                spec = self.store.schema.fields.get(name)
                if spec is None:
                    raise UserError(f"{url}: column {name!r} is no field of {self.store.url}; it has "
                                    f"{sorted(self.store.schema.fields)}.")
                encoded[name] = spec.encode(np.asarray(array).reshape(len(keys), *spec.shape))
            yield keys, encoded


def _known(reader: SnapshotReader, name: str) -> str:
    if name not in reader.schema.fields:
        raise UserError(f"no field {name!r}; the store has {sorted(reader.schema.fields)}.")
    return name


def _parquet(keys: list[str], values: dict[str, np.ndarray], reader: SnapshotReader) -> bytes:
    import pyarrow as pa  # half a second that only exports pay
    import pyarrow.parquet as pq

    columns: dict[str, pa.Array] = {"key": pa.array(keys, pa.string())}
    for name, array in values.items():
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        width = reader.schema.fields[name].columns
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width) if reader.schema.fields[name].shape else flat
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def _read_parquet(data: bytes, url: str) -> tuple[list[str], dict[str, np.ndarray]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data)).combine_chunks()
        keys = table["key"].to_pylist()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"{url}: not an exported Parquet file ({error}).") from None
    values = {}
    for name in table.column_names:
        if name != "key":
            column = table[name].combine_chunks()
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            values[name] = flat.to_numpy(zero_copy_only=False)
    return keys, values


def _npz(keys: list[str], values: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, key=np.array(keys, dtype=np.str_), **values)  # type: ignore[arg-type]
    return buffer.getvalue()


def _read_npz(data: bytes, url: str) -> tuple[list[str], dict[str, np.ndarray]]:
    try:
        values = unpacked(data)
        return values.pop("key").tolist(), values
    except Exception as error:  # zipfile and numpy raise many kinds for damaged bytes
        raise UserError(f"{url}: not an exported npz file ({type(error).__name__}: {error}).") from None
