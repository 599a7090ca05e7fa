"""Opened shards: a tar's bytes at hand, its labels, and which rows of it take part.

A tar is fetched by one sequential read: a local one is announced to the kernel's read-ahead, a remote one is streamed
into an unlinked scratch file. Rows are then read by offset, so memory holds undecoded bytes of single samples only (and
the vectors of small feature shards, shard_vectors.py).
"""

from __future__ import annotations

import errno
import operator
import os
import tempfile
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lacuna.basics import retries, storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import decode_vector
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.data_pipelines.subsets import Subset

if TYPE_CHECKING:
    from lacuna.data_pipelines.shard_vectors import ShardVectors

_COPY_BYTES = 8 << 20
_TAR_BLOCK = 512
_TAR_NAME_BYTES = 100


@dataclass(frozen=True)
class ShardSource:
    """A dataset as one user sees it: shards, one label sidecar, optionally a subset of the rows."""

    index: ShardIndex
    sidecar: Sidecar
    subset: Subset | None = None
    scratch: str | None = None

    @classmethod
    def load(cls, url: str, labels: str, subset: str | None, scratch: str | None = None) -> ShardSource:
        index = ShardIndex.load(url)
        return cls(index, Sidecar.load(index, labels), Subset.load(index, subset) if subset else None, scratch)

    @property
    def counts(self) -> np.ndarray:
        """int64 [shards]: rows that take part."""
        return self.index.counts if self.subset is None else np.asarray(self.subset.counts, dtype=np.int64)

    def used(self, shard: int) -> np.ndarray:
        """int64: rows of a shard that take part, ascending."""
        return np.arange(self.index.shards[shard].count) if self.subset is None else np.flatnonzero(
            self.subset.mask(shard))

    @property
    def classes(self) -> int:
        return len(self.index.classes)

    @cached_property
    def feature_width(self) -> int:
        """Vector length of feature shards, from the first row; 0 for images."""
        if self.index.kind != "feature":
            return 0
        return len(decode_vector(self.open(int(np.flatnonzero(self.index.counts)[0])).read(0)))

    def open(self, shard: int, known: np.ndarray | None = None) -> OpenShard:
        """`known`, bool [rows of the tar]: rows whose bytes nobody will read."""
        return OpenShard(self, shard, known)

    def subset_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """(positives, negatives) per class over the rows that take part, by one pass over the label files."""
        totals = np.zeros((2, self.classes), dtype=np.int64)
        for shard in np.flatnonzero(self.counts):
            labels = self.sidecar.labels(int(shard))
            dense = labels.dense(self.classes, None if self.subset is None else np.flatnonzero(self.subset.mask(shard)))
            totals += np.stack([(dense == POSITIVE).sum(0), (dense == NEGATIVE).sum(0)])
        return totals[0], totals[1]


class OpenShard:
    """One shard while its samples are in flight; closed when the last reader lets go of it.

    The tar itself is fetched only if it has a row that takes part and is not known already.
    """

    def __init__(self, source: ShardSource, shard: int, known: np.ndarray | None = None):
        self.shard = shard
        self.url = source.index.shard_url(shard)
        self.members = source.index.members(shard)
        self.labels = source.sidecar.labels(shard)
        self.used = source.used(shard)
        self.known = known
        self.vectors: ShardVectors | None = None  # of feature shards
        if known is None or not known[self.used].all():
            self.descriptor = _fetch(self.url, source.index.shards[shard].bytes, source.scratch)
            weakref.finalize(self, os.close, self.descriptor)

    def read(self, row: int) -> bytes:
        """The undecoded bytes of a row (its position in the tar)."""
        offset, size = int(self.members.offsets[row]), int(self.members.sizes[row])
        # Two calls cost less than cutting the header off a larger one, which would copy the image.
        header = os.pread(self.descriptor, _TAR_NAME_BYTES, offset - _TAR_BLOCK) if offset >= _TAR_BLOCK else b""
        data = os.pread(self.descriptor, size, offset)
        name = self._name(row)
        found = header.rstrip(b"\0").removeprefix(b"./")
        # Names that are long or not ASCII may live in an extra header block, which is not worth another read.
        comparable = len(name) < _TAR_NAME_BYTES and name.isascii()
        if len(data) != size or (comparable and found != name.encode()):
            raise UserError(
                f"{self.url}: row {row} should be {name!r} at byte {offset}, but the tar has "
                f"{found.decode(errors='replace')!r} there: the index does not match the tar. "
                "Rebuild it with `lacuna shards index`."
            )
        return data

    def span(self, rows: np.ndarray) -> int:
        """Bytes from the first header of these rows to the end of the last one's data."""
        offsets = self.members.offsets[rows]
        return int((offsets + self.members.sizes[rows]).max() - offsets.min()) + _TAR_BLOCK

    def read_together(self, rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of one size by a single read: (uint8 [k, size], bool [k]: whether the tar has its name there); k = 0 if
        the tar is shorter than they need. A row that is not named so may still be right (a long name): `read` tells.
        """
        start = int(self.members.offsets[rows].min()) - _TAR_BLOCK
        places = self.members.offsets[rows] - start
        block = np.frombuffer(os.pread(self.descriptor, self.span(rows), max(0, start)), np.uint8)
        if start < 0 or len(block) < self.span(rows):
            return np.zeros((0, size), np.uint8), np.zeros(0, bool)
        headers = np.ascontiguousarray(_windows(block, _TAR_NAME_BYTES, places - _TAR_BLOCK))
        found = headers.view(f"S{_TAR_NAME_BYTES}").ravel().tolist()  # without the zeros at their ends
        wanted = self._names(rows)
        named = (np.ones(len(rows), bool) if found == wanted  # the usual case, without a call per row
                 else np.fromiter(map(operator.eq, found, wanted), bool, len(rows)))
        return _windows(block, size, places), named

    def _names(self, rows: np.ndarray) -> list[bytes]:
        keys, kinds = self.members.keys, set(self.members.extensions)
        if len(rows) < len(keys) or len(kinds) > 1:
            return "\n".join(map(self._name, rows.tolist())).encode().split(b"\n")
        ending = f".{kinds.pop()}"  # of all: one call instead of one per row, beside which the loop would wait
        return (f"{ending}\n".join(keys) + ending).encode().split(b"\n")

    def _name(self, row: int) -> str:
        return f"{self.members.keys[row]}.{self.members.extensions[row]}"


def _windows(block: np.ndarray, size: int, places: np.ndarray) -> np.ndarray:
    """uint8 [k, size]: `size` bytes from every place on; a view of the block if the places are evenly spaced."""
    windows, steps = sliding_window_view(block, size), np.diff(places)
    if len(steps) and steps[0] > 0 and (steps == steps[0]).all():
        return windows[places[0] : places[-1] + 1 : steps[0]]
    return windows[places]


def _fetch(url: str, expected: int, scratch: str | None) -> int:
    """A descriptor for random reads of the whole tar, whose size is checked against the index."""
    try:
        if storage.is_local(url):
            descriptor = os.open(storage.local_path(url), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        else:
            descriptor = retries.retrying(lambda: _download(url, expected, scratch), url)
    except FileNotFoundError:
        raise UserError(f"{url}: this shard is in the index but not in the folder. Restore it, or rebuild the index "
                        "with `lacuna shards index`.") from None
    found = os.fstat(descriptor).st_size
    if found != expected:
        os.close(descriptor)
        raise UserError(f"{url}: {found:,} bytes, the index says {expected:,}: the tar is truncated or was replaced. "
                        "Restore it, or rebuild the index with `lacuna shards index`.")
    return descriptor


def _download(url: str, expected: int, scratch: str | None) -> int:
    # The file has no name: whatever ends this process, nothing is left behind.
    with tempfile.TemporaryFile(dir=scratch, prefix="lacuna-shard-") as target:
        with storage.open_stream(url) as stream:
            while block := stream.read(_COPY_BYTES):
                _write(target, block, scratch)
        target.flush()
        received = target.tell()
        # Shorter than the index says: worth another try only if the server has more than it sent.
        if received < expected and storage.size(url) != received:
            raise OSError(f"{url}: connection ended after {received:,} of {expected:,} bytes")
        return os.dup(target.fileno())


def _write(target: IO[bytes], block: bytes, scratch: str | None) -> None:
    try:
        target.write(block)
        target.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{scratch or tempfile.gettempdir()}: no space left for downloaded shards. Set data.scratch to "
                        "a folder with room for data.streams × (data.open_shards + 1) of them.") from None
