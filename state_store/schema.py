"""A store's schema: shards, fields and seed, written as Zarr v3 metadata; opening with anything else is refused.

Layout of a store (`<url>/`):
    zarr.json                       Zarr group; its attributes hold the schema, with a checksum
    schema.json                     the same bytes once more
    <field>/zarr.json               Zarr array (shards, rows of the longest shard, *shape), one chunk a shard
    chunks/<field>/<shard>.<token>  chunk objects: written once, never changed; bytes as Zarr would write them
    manifests/<token>.json          one snapshot: which object is each chunk's version
    log/<number>.json               launches and snapshots in order; creating an entry is the commit
    claims/<launch>-<rank>.json    the shards that a rank of this launch is working on
A chunk that no manifest lists was never written: its rows still have their initial values.
The metadata are written as text rather than through zarr-python: a training process then need not import it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.state_store import faults
from lacuna.state_store.fields import Constant, Field

VERSION = 2
GROUP, COPY = "zarr.json", "schema.json"
ATTRIBUTE = "lacuna_state"
_CHUNK_LIMIT = (1 << 31) - 64  # Blosc's largest buffer


class DamagedSchema(UserError):
    """The file is there, but is not what was written."""


@dataclass(frozen=True, eq=False)
class Schema:
    counts: np.ndarray  # int64 [shards]: rows of every shard
    fingerprint: str  # of the shard index (samples and class list)
    seed: int
    fields: dict[str, Field]

    @classmethod
    def of(cls, counts: Sequence[int] | np.ndarray, fingerprint: str, fields: Sequence[Field], seed: int) -> Schema:
        counts = np.asarray(counts, dtype=np.int64)
        if counts.ndim != 1 or not len(counts) or int(counts.min()) < 0 or int(counts.max()) < 1:
            raise UserError("a state store needs at least one shard with rows; found row counts "
                            f"{counts.tolist()[:5]}. Check the shard index.")
        if not fields:
            raise UserError("a state store needs at least one field; the method declares none.")
        names = [field.name for field in fields]
        if len(set(names)) < len(names):
            raise UserError(f"field names must differ; found {names}.")
        schema = cls(counts, fingerprint, int(seed), {field.name: field for field in fields})
        for field in fields:
            if field.row_bytes * schema.max_rows > _CHUNK_LIMIT:
                raise UserError(f"field {field.name!r}: a shard of {schema.max_rows} rows needs "
                                f"{field.row_bytes * schema.max_rows / 1e9:.1f} GB in one chunk, the limit is 2.1 GB. "
                                "Make smaller shards (`lacuna shards make`).")
        return schema

    @property
    def shards(self) -> int:
        return len(self.counts)

    @cached_property
    def max_rows(self) -> int:
        return int(self.counts.max())

    @property
    def shard_bytes(self) -> int:
        """RAM of one shard's rows, all fields."""
        return sum(field.row_bytes for field in self.fields.values()) * self.max_rows

    def check_shard(self, shard: int) -> None:
        if not 0 <= shard < self.shards:
            raise UserError(f"shard {shard}: the store has shards 0..{self.shards - 1}.")

    def group_json(self) -> bytes:
        body = {
            "version": VERSION, "fingerprint": self.fingerprint, "seed": self.seed,
            "rows": self.counts.tolist(),  # the counts' name in every store there is
            "fields": [field.to_json() for field in self.fields.values()],
        }
        body["sha256"] = _checksum(body)
        return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: body}}).encode()

    def array_json(self, field: Field) -> bytes:
        """Zarr v3 metadata of one field's array."""
        fill: object = 0
        if isinstance(field.initial, Constant):
            code = field.initial_code().reshape(-1)[0]
            fill = float(code) if field.stored_dtype.kind == "f" else int(code)
        body = {
            "zarr_format": 3, "node_type": "array", "shape": [self.shards, self.max_rows, *field.stored_shape],
            "data_type": field.stored_dtype.name,
            "chunk_grid": {"name": "regular",
                           "configuration": {"chunk_shape": [1, self.max_rows, *field.stored_shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill, "codecs": _codecs(field), "storage_transformers": [],
            "attributes": {ATTRIBUTE: field.to_json()},
        }
        return json.dumps(body).encode()

    def readable_array_json(self, field: Field) -> bytes:
        """The same for outside readers: named dimensions (xarray needs them) and what turns codes into values (CF)."""
        body = json.loads(self.array_json(field))
        body["dimension_names"] = ["shard", "row", *(f"{field.name}_{i}" for i in range(len(field.stored_shape)))]
        if field.range is not None:
            low, high = field.range
            body["attributes"] |= {"scale_factor": (high - low) / int(np.iinfo(field.stored_dtype).max),
                                   "add_offset": low}
        return json.dumps(body).encode()

    @classmethod
    def parse(cls, data: bytes, where: str) -> Schema:
        try:
            body = parse_json(data)["attributes"][ATTRIBUTE]
            version = int(body["version"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DamagedSchema(f"{where}: not a Lacuna state store, or its metadata are truncated "
                                f"({type(error).__name__}: {error}). Restore this file from a backup, or create a new "
                                "store at another URL.") from None
        if version != VERSION:
            raise UserError(f"{where}: schema version {version}, this program reads version {VERSION}: another version "
                            "of Lacuna wrote it. Go on with that one, or begin a new run (another name=…).")
        if body.pop("sha256", None) != _checksum(body):
            raise DamagedSchema(f"{where}: damaged schema (its checksum does not fit). Restore this file from a "
                                "backup, or create a new store at another URL.")
        try:
            fields = [Field.from_json(item) for item in body["fields"]]
            return cls.of(body["rows"], str(body["fingerprint"]), fields, int(body["seed"]))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise DamagedSchema(f"{where}: damaged schema ({type(error).__name__}: {error}). Restore this file from a "
                                "backup, or create a new store at another URL.") from None

    def differences(self, other: Schema) -> list[str]:
        """What `other` (asked for) has that this one (in the store) has not, in words."""
        found = []
        if self.fingerprint != other.fingerprint or not np.array_equal(self.counts, other.counts):
            found.append(f"shard index {self.fingerprint} ({self.shards} shards, {int(self.counts.sum())} samples) in "
                         f"the store, {other.fingerprint} ({other.shards} shards, {int(other.counts.sum())} samples) "
                         "asked (samples, shards or class list changed: see `lacuna state reshard`)")
        if self.seed != other.seed:
            found.append(f"seed {self.seed} in the store, {other.seed} asked")
        for name in self.fields.keys() | other.fields.keys():
            if name not in other.fields:
                found.append(f"field {name!r} is in the store but not asked for")
            elif name not in self.fields:
                found.append(f"field {name!r} is asked for but not in the store")
            else:
                mine, theirs = self.fields[name].to_json(), other.fields[name].to_json()
                found += [f"field {name!r}: {key} {mine[key]} in the store, {theirs[key]} asked"
                          for key in mine if mine[key] != theirs[key]]
        return sorted(found)


def write_schema(url: str, schema: Schema) -> None:
    """Create the store's metadata; the group is written last and only if absent, so a store is there whole or not."""
    if is_store(url):
        raise UserError(f"{url}: there is already a store. Open it, or choose another URL.")
    for field in schema.fields.values():
        storage.write_atomic(storage.join(url, field.name, "zarr.json"), schema.array_json(field))
        faults.point("create.array")
    faults.point("create.before_group")
    if not storage.create_exclusive(storage.join(url, COPY), schema.group_json()):
        raise UserError(f"{url}: another process created a store here just now. Open it instead.")
    storage.write_atomic(storage.join(url, GROUP), schema.group_json())


def is_store(url: str) -> bool:
    return any(storage.exists(storage.join(url, name)) for name in (GROUP, COPY))


def read_schema(url: str) -> Schema:
    """From the group's metadata, or from their copy if those are damaged or gone (`mend_schema` writes them anew)."""
    problem: UserError | None = None
    for name in (GROUP, COPY):
        where = storage.join(url, name)
        try:
            return Schema.parse(storage.read_bytes(where), where)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except DamagedSchema as error:
            problem = problem or error
    raise problem or UserError(f"{url}: no state store here ({storage.join(url, GROUP)} is missing). Check the URL; "
                               "training with a stateful method creates it.")


def written_metadata(schema: Schema) -> dict[str, bytes]:
    """Name → content of every file of metadata that does not change."""
    return {GROUP: schema.group_json(), COPY: schema.group_json(),
            **{f"{field.name}/zarr.json": schema.array_json(field) for field in schema.fields.values()}}


def mend_schema(url: str, schema: Schema) -> list[str]:
    """Write anew what is not as it was written; the names of those files."""
    mended = []
    for name, data in written_metadata(schema).items():
        try:
            same = storage.read_bytes(storage.join(url, name)) == data
        except FileNotFoundError:
            same = False
        if not same:
            storage.write_atomic(storage.join(url, name), data)
            mended.append(name)
    return mended


def _checksum(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _codecs(field: Field) -> list[dict]:
    codecs: list[dict] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if field.stored_dtype.itemsize == 1:
        codecs = [{"name": "bytes"}]
    if field.compression != "none":
        codecs.append({"name": "blosc", "configuration": {
            "typesize": field.stored_dtype.itemsize, "cname": field.compression,
            "clevel": 5 if field.compression == "lz4" else 1, "shuffle": "bitshuffle", "blocksize": 0}})
    return [*codecs, {"name": "crc32c"}]
