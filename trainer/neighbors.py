"""Neighbours of training samples and distances between classes: what `lacuna neighbors` leaves and training reads.

A neighbours folder (or fsspec URL) holds
    neighbors.json        what it was made for: fingerprints of index, labels and subset; k, distance, hashes
    class_distances.npy   float32 [L, L] between the class medians; infinite where a class has no annotated positive
    class_medians.npy     float32 [L, D]; NaN where a class has no annotated positive
    state/                a state store with the snapshot SNAPSHOT and these fields of every sample:
        neighbor_ids        int64 [k]    nearest first, counted over the shards in order; −1: there are fewer
        neighbor_distances  float32 [k]  infinite where there is no neighbour
        near_classes        int32 [M]    classes that a neighbour has an annotation of, ascending; −1: there are fewer
        near_positive       int64 [M]    bit j is set if neighbour j has that class as a positive
        near_negative       int64 [M]    … as a verified negative
Bits instead of distances: any statistic of the k distances can be taken later, and they compress.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.npy_header import alone
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store import Field, Given
from lacuna.state_store.store import SnapshotReader

VERSION = 1
FACTS_NAME = "neighbors.json"
DISTANCES_NAME = "class_distances.npy"
MEDIANS_NAME = "class_medians.npy"
STATE_NAME = "state"
SNAPSHOT = "neighbors"
MOST_NEIGHBORS = 62  # bits of an int64 that stays positive
DISTANCES = ("euclidean", "cosine")
NONE = -1  # no neighbour, no class


@dataclass(frozen=True)
class Neighborhood:
    """The content of neighbors.json, and a way to the rest."""

    url: str
    k: int
    slots: int  # M
    classes: int  # L
    distance: str  # one of DISTANCES
    data: dict[str, str]  # fingerprints of what it was made for: see `data_fingerprints`
    distances_sha256: str  # of class_distances.npy
    version: int = VERSION

    @classmethod
    def open(cls, url: str) -> Neighborhood:
        where = storage.join(url, FACTS_NAME)
        advice = "Make it with `lacuna neighbors`; it is written last, so without it the rest is unfinished."
        try:
            body = json.loads(storage.read_bytes(where))
            found = cls(url, int(body["k"]), int(body["slots"]), int(body["classes"]), str(body["distance"]),
                        dict(body["data"]), str(body["distances_sha256"]), int(body["version"]))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{where}: no such file. {advice}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: damaged ({type(error).__name__}: {error}). {advice}") from None
        if found.version != VERSION:
            raise UserError(f"{where}: version {found.version}, this program reads version {VERSION}. Make it again.")
        return found

    def save(self, more: Mapping[str, object]) -> None:
        """The last step of making one; `more` is for people."""
        body = {key: value for key, value in asdict(self).items() if key != "url"}
        storage.write_atomic(storage.join(self.url, FACTS_NAME), json.dumps({**body, **more}, indent=1).encode())

    @property
    def fingerprint(self) -> str:
        """Of everything that temperatures depend on."""
        facts = {key: value for key, value in asdict(self).items() if key != "url"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def check(self, classes: int, data: Mapping[str, str]) -> None:
        """That it was made for this class list, these shards, labels and rows."""
        if self.classes != classes:
            raise UserError(f"{self.url}: made for {self.classes} classes, the training data has {classes}. Make it "
                            "for this dataset with `lacuna neighbors`.")
        for what, made_for in self.data.items():
            if data and data.get(what) != made_for:
                raise UserError(f"{self.url}: made for another {what} ({made_for or 'none'}) than that of data.train "
                                f"({data.get(what) or 'none'}). Make it again with `lacuna neighbors` and the url, "
                                "labels and subset of data.train.")

    def class_distances(self) -> np.ndarray:
        """float32 [L, L]."""
        where = storage.join(self.url, DISTANCES_NAME)
        try:
            data = storage.read_bytes(where)
        except FileNotFoundError:
            raise UserError(f"{where}: no such file. Make it again with `lacuna neighbors`.") from None
        if hashlib.sha256(data).hexdigest() != self.distances_sha256:
            raise UserError(f"{where}: its content does not fit {FACTS_NAME}. Make both again with `lacuna neighbors`.")
        return alone(lambda: np.load(io.BytesIO(data), allow_pickle=False))

    def fields(self) -> list[Field]:
        """What training keeps at hand of every sample: never written, so the run stores none of it."""
        start = Given(f"neighbors-{self.fingerprint}")
        return [Field(field.name, field.shape, field.dtype, start, compression=field.compression)
                for field in stored_fields(self.k, self.slots) if field.name != "neighbor_ids"]

    def rows(self, field: str, shard: int) -> np.ndarray:
        return self._reader.read_shard(field, shard)

    @cached_property
    def _reader(self) -> SnapshotReader:
        return state_store.open(storage.join(self.url, STATE_NAME)).reader(SNAPSHOT)


def stored_fields(k: int, slots: int) -> list[Field]:
    none = state_store.Constant(NONE)
    return [Field("neighbor_ids", (k,), "int64", none), Field("neighbor_distances", (k,), "float32"),
            Field("near_classes", (slots,), "int32", none), Field("near_positive", (slots,), "int64"),
            Field("near_negative", (slots,), "int64")]


def data_fingerprints(source: ShardSource) -> dict[str, str]:
    """What a neighbourhood depends on, by the words that messages use."""
    return {"shard index": source.index.fingerprint, "label sidecar": source.sidecar.fingerprint,
            "subset": source.subset.fingerprint if source.subset else ""}
