"""Manifests: one immutable object per snapshot that lists the version of every written chunk; and ranks' deltas."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import google_crc32c
import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.state_store.chunks import Ref

_NAME = re.compile(r"\w[\w-]*", re.ASCII)
Refs = dict[str, dict[int, Ref]]  # field → shard → version


@dataclass
class Manifest:
    refs: Refs
    histograms: dict[str, Ref] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        body = {"refs": {name: {str(shard): list(ref) for shard, ref in shards.items()}
                         for name, shards in self.refs.items()},
                "histograms": {name: list(ref) for name, ref in self.histograms.items()}}
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        try:
            body = parse_json(data)
            refs = {_plain(name): {int(shard): _ref(ref) for shard, ref in shards.items()}
                    for name, shards in body["refs"].items()}
            return cls(refs, {_plain(name): _ref(ref) for name, ref in body["histograms"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{where}: damaged manifest ({type(error).__name__}: {error}). Use another snapshot "
                            "(`lacuna state snapshots`) or restore the file from a backup.") from None

    def objects(self) -> set[tuple[str, str]]:
        """(folder-relative object names) as (kind, name) pairs that this snapshot needs."""
        named = {("chunks/" + name, f"{shard:06d}.{ref.token}") for name, shard, ref in walk(self.refs)}
        return named | {("histograms", f"{name}.{ref.token}") for name, ref in self.histograms.items()}


def _plain(name: str) -> str:
    """Names become parts of paths: none may lead out of the store."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}")
    return name


def _ref(values: list) -> Ref:
    token, size, crc = values
    return Ref(_plain(token), int(size), int(crc))


@dataclass
class Delta:
    """What one rank wrote since the ranks last exchanged deltas. Picklable: the trainer gathers it over its network."""

    launch: int
    rank: int
    world: int
    durable: bool
    refs: Refs
    histograms: dict[str, np.ndarray] = field(default_factory=dict)  # changes, int64 [columns, 256]


class DamagedHistogram(UserError):
    """Counts can be taken anew from the values."""


def walk(refs: Refs) -> Iterator[tuple[str, int, Ref]]:
    for name, shards in refs.items():
        for shard, ref in shards.items():
            yield name, shard, ref


def merged(base: Refs, deltas: list[Delta]) -> Refs:
    """Base overlaid with what the ranks wrote; two ranks that wrote one shard broke the one-writer law."""
    result = {name: dict(shards) for name, shards in base.items()}
    writer: dict[int, int] = {}
    for delta in deltas:
        for name, shard, ref in walk(delta.refs):
            if writer.setdefault(shard, delta.rank) != delta.rank:
                raise UserError(f"shard {shard} was written by rank {writer[shard]} and by rank {delta.rank} since the "
                                "last exchange: one shard has one writer. Check that the epoch plan deals every shard "
                                "to one rank.")
            result.setdefault(name, {})[shard] = ref
    return result


def check_deltas(deltas: list[Delta], launch: int, world: int) -> None:
    """Every rank of this launch exactly once."""
    ranks = sorted(delta.rank for delta in deltas)
    if ranks != list(range(world)):
        raise UserError(f"deltas of ranks {ranks} given, expected one of each rank 0..{world - 1}.")
    others = sorted({delta.launch for delta in deltas} - {launch})
    if others:
        raise UserError(f"a delta of launch {others[0]} given to launch {launch}: all ranks must be of one launch.")


def write_manifest(store: str, token: str, manifest: Manifest) -> str:
    """Write durably; returns the content's hash, which the log entry will carry."""
    data = manifest.to_bytes()
    storage.write_atomic(manifest_url(store, token), data)
    return hashlib.sha256(data).hexdigest()


def read_manifest(store: str, token: str, sha256: str) -> Manifest:
    url = manifest_url(store, token)
    advice = "`lacuna state verify --repair` takes it from the checkpoint that belongs to it, as the next launch does."
    try:
        data = storage.read_bytes(url)
    except FileNotFoundError:
        raise UserError(f"{url}: this snapshot's manifest is missing. {advice}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{url}: this snapshot's manifest is damaged (its hash does not fit the log). {advice}")
    return Manifest.from_bytes(data, url)


def manifest_url(store: str, token: str) -> str:
    return storage.join(store, "manifests", token + ".json")


def object_url(store: str, kind: str, name: str) -> str:
    return storage.join(store, kind, name)


def write_histogram(store: str, name: str, token: str, counts: np.ndarray) -> Ref:
    """Counts as compressed int64; the caller makes it durable with the manifest."""
    data = zlib.compress(np.ascontiguousarray(counts, dtype="<i8").tobytes(), 1)
    storage.write_atomic(object_url(store, "histograms", f"{name}.{token}"), data)
    return Ref(token, len(data), google_crc32c.value(data))


def read_histogram(store: str, name: str, ref: Ref) -> np.ndarray:
    url = object_url(store, "histograms", f"{name}.{ref.token}")
    try:
        data = storage.read_bytes(url)
    except FileNotFoundError:
        raise DamagedHistogram(f"{url}: the histogram of field {name!r} is missing") from None
    if google_crc32c.value(data) != ref.crc:
        raise DamagedHistogram(f"{url}: the histogram of field {name!r} is damaged")
    return np.frombuffer(zlib.decompress(data), "<i8").reshape(-1, 256).astype(np.int64)
