"""Part files: what a pass found out about one shard, written once, whole, under a name that says which pass it was.

A pass is named by a fingerprint of everything that its numbers depend on (weights, shard index, protocol). A part that
is there is finished: a rerun skips it, and a shard that two workers did by accident is still one file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.npy_header import unpacked


def fingerprint_of(**facts) -> str:
    """16 hex digits of JSON-able facts, whatever their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def absolute(url: str) -> str:
    """Workers run elsewhere: a local path must not depend on the current folder."""
    return os.path.abspath(storage.local_path(url)) if storage.is_local(url) else url.rstrip("/")


@dataclass(frozen=True)
class Parts:
    """The part files of one pass in a folder (or fsspec URL) that may hold those of others."""

    folder: str
    fingerprint: str

    def url(self, shard: int) -> str:
        return storage.join(self.folder, f"part-{shard:06d}.{self.fingerprint}.npz")

    def finished(self, shards: list[int]) -> set[int]:
        """Which of the shards have their part: one listing, no file is opened."""
        there = set(storage.list_names(self.folder))
        return {shard for shard in shards if self.url(shard).rsplit("/", 1)[-1] in there}

    def write(self, shard: int, arrays: Mapping[str, np.ndarray]) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        storage.write_atomic(self.url(shard), buffer.getvalue())

    def read(self, shard: int) -> dict[str, np.ndarray]:
        url = self.url(shard)
        try:
            return unpacked(storage.read_bytes(url))
        except FileNotFoundError:
            raise UserError(f"{url}: a worker wrote this file, but it is not here. Give --parts a folder that all "
                            "nodes share, or an s3:// URL.") from None
        except Exception as error:  # zipfile and numpy raise many kinds for damaged bytes
            raise UserError(f"{url}: damaged ({type(error).__name__}: {error}). Remove it and run again.") from None

    def read_all(self, shards: list[int]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """(shard, arrays) in shard order: sums taken over it do not depend on who did what when."""
        for shard in sorted(shards):
            yield shard, self.read(shard)

    def remove(self, shards: list[int]) -> None:
        storage.remove([self.url(shard) for shard in shards])
