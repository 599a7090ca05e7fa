"""Named subsets of a dataset's rows, such as `train` and `val`: a validation split over the same tars and sidecars.

A subset is `subsets/<name>.json` (what it is, its number of rows, a hash) beside `subsets/<name>.bin`: one bit a row,
every shard's bits starting on a byte. 9 million rows take 1.1 MB, so it is read whole.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.index import INDEX_NAME, ShardIndex, names_in, opening

SUBSET_VERSION = 1


@dataclass(frozen=True)
class Subset:
    """Which rows of an index take part."""

    index: ShardIndex
    name: str
    bits: bytes  # every shard's mask, packed
    source: dict = field(default_factory=dict)  # how it was made, for humans

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [shards]: rows of every shard that take part."""
        return np.array([int(self.mask(s).sum()) for s in range(len(self.index.shards))], np.int64)

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    @property
    def fingerprint(self) -> str:
        """Names the rows: equal for equal subsets of equal indexes, whatever their names."""
        return hashlib.sha256(self.index.fingerprint.encode() + self.bits).hexdigest()[:16]

    def mask(self, shard: int | np.integer) -> np.ndarray:
        """bool [rows of the shard]: True for rows that take part."""
        first, end = self._byte_starts[shard : shard + 2].tolist()
        packed = np.frombuffer(self.bits, np.uint8, end - first, first)
        return np.unpackbits(packed, count=self.index.shards[shard].count).astype(bool)

    @cached_property
    def _byte_starts(self) -> np.ndarray:
        """int64 [shards + 1]: where every shard's bits begin."""
        return np.concatenate([[0], np.cumsum((self.index.counts + 7) // 8)])

    @classmethod
    def from_masks(cls, index: ShardIndex, name: str, masks: list[np.ndarray], source: dict) -> Subset:
        """From one bool [rows] a shard."""
        if "/" in name or name in ("", ".", ".."):
            raise UserError(f"subset name {name!r}: use letters, digits, '-', '_' and '.'.")
        assert [len(m) for m in masks] == index.counts.tolist(), f"subset {name}: masks do not fit the shards"
        return cls(index, name, b"".join(np.packbits(m).tobytes() for m in masks), source)

    def save(self) -> None:
        """Write the bits, then the description that names them."""
        storage.write_atomic(_url(self.index, self.name, ".bin"), self.bits)
        body = {"version": SUBSET_VERSION, "index_fingerprint": self.index.fingerprint, "samples": self.samples,
                "fingerprint": self.fingerprint, "source": self.source}
        storage.write_atomic(_url(self.index, self.name, ".json"), json.dumps(body).encode())

    @classmethod
    def load(cls, index: ShardIndex, name: str) -> Subset:
        where = _url(index, name, ".json")
        again = f"Make it again with `lacuna annotate {index.url}`."
        make = f"Make `train` and `val` with `lacuna annotate {index.url} --scheme val_split`."
        with opening(index, "subsets", name, "subset", make, again):
            body = parse_json(storage.read_bytes(where))
            made_for, fingerprint = body["index_fingerprint"], body["fingerprint"]
            if body["version"] != SUBSET_VERSION:
                raise UserError(f"{where}: version {body['version']!r}, this program reads version {SUBSET_VERSION}.")
            subset = cls(index, name, storage.read_bytes(_url(index, name, ".bin")), dict(body["source"]))
        if made_for != index.fingerprint:
            raise UserError(f"{where}: made for another index than {index.url}/{INDEX_NAME} "
                            f"({index.fingerprint}). {again}")
        if len(subset.bits) != subset._byte_starts[-1] or subset.fingerprint != fingerprint:
            raise UserError(f"{_url(index, name, '.bin')}: its content does not fit {name}.json. {again}")
        return subset


def subset_names(index: ShardIndex) -> list[str]:
    return names_in(index, "subsets")


def _url(index: ShardIndex, name: str, suffix: str) -> str:
    return storage.join(index.url, "subsets", name + suffix)
