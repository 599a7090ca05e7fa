"""Packs a reader's dataset into globally shuffled WebDataset shards with an index and the sidecar `labels`.

Layout: the shard count is a multiple of `streams` (when there are that many samples), shard sizes differ by at most one
row, and a shard stays below `shard_mb` and MAX_ROWS. 128 MB is one comfortable sequential read; more rows a shard mean
larger state chunks (at L = 1000 a byte-wide field has 1 kB a row), so shards are not made smaller than MIN_ROWS just to
have SHARDS_PER_STREAM of them, which the epoch plan wants for good mixing.

The same dataset, seed and settings give the same bytes, so a lost dataset can be made again.
"""

from __future__ import annotations

import errno
import io
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.encoding import shrink_to_jpeg
from lacuna.data_pipelines.index import Shard, ShardIndex, SidecarWriter
from lacuna.data_pipelines.output_folder import OutputFolder
from lacuna.data_pipelines.readers.base import Dataset, Sample
from lacuna.data_pipelines.sample_keys import distinct_keys
from lacuna.data_pipelines.shard_tables import Members
from lacuna.data_pipelines.tar_writer import TarWriter

SIDECAR_NAME = "labels"  # what a make's own labels are called; simulated annotations get other names
SHARDS_PER_STREAM = 16
MIN_ROWS = 512
MAX_ROWS = 8192
SKIPPED_NAME = "skipped.txt"
_PROBES = 256  # files whose size is looked at to estimate the whole
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Layout:
    """How to cut the dataset: see the top of the file."""

    streams: int = 16
    shard_mb: float = 128.0
    rows_per_shard: int | None = None  # an upper bound that replaces the automatic choice
    seed: int = 0
    shuffle: bool = True

    def shard_count(self, samples: int, mean_bytes: float) -> int:
        if self.streams < 1 or self.shard_mb <= 0 or (self.rows_per_shard is not None and self.rows_per_shard < 1):
            raise UserError(f"--streams {self.streams}, --shard-mb {self.shard_mb}, --rows-per-shard "
                            f"{self.rows_per_shard}: all must be above 0.")
        if self.rows_per_shard is not None:
            wanted = math.ceil(samples / self.rows_per_shard)
        else:
            most = max(1, min(MAX_ROWS, int(self.shard_mb * 1e6 / max(mean_bytes, 1.0))))
            wanted = max(math.ceil(samples / most), min(SHARDS_PER_STREAM * self.streams, samples // MIN_ROWS))
        shards = math.ceil(max(wanted, 1) / self.streams) * self.streams
        if shards > samples:
            shards = samples // self.streams * self.streams or samples
        return shards

    def order(self, samples: int) -> np.ndarray:
        """int64 [N]: positions in the reader's order, in the order of the shards."""
        # RandomState's stream is frozen for good; default_rng's may change with NumPy.
        return np.random.RandomState(self.seed).permutation(samples) if self.shuffle else np.arange(samples)


def pack(dataset: Dataset, out: str, layout: Layout, *, workers: int = 0, resize: int | None = None,
         overwrite: bool = False, advance: Callable[[int], None] | None = None) -> ShardIndex:
    """Write the dataset to `out` (a folder or an fsspec URL); `advance(rows)` is told about finished rows."""
    _refuse_bad_dataset(dataset)
    dataset = distinct_keys(dataset)
    if resize is not None and (resize < 1 or dataset.kind != "image"):
        raise UserError(f"--resize {resize}: must be ≥ 1, and works on images only (these are {dataset.kind}s).")
    with OutputFolder(out, overwrite) as folder:
        mean = _mean_bytes(dataset.samples, resize)
        needed = int(len(dataset.samples) * (mean + 1024))
        _refuse_small_disk(folder, needed)
        rows = np.array_split(layout.order(len(dataset.samples)), layout.shard_count(len(dataset.samples), mean))
        try:
            index = _write_all(dataset, folder, rows, workers, resize, advance or (lambda count: None))
            folder.publish({shard.name for shard in index.shards})
        except OSError as error:
            if error.errno in _FULL:
                raise UserError(_full_disk(folder.url, needed)) from None
            if isinstance(error, PermissionError):
                raise UserError(f"--out {out}: writing is not permitted ({error}). Choose another place.") from None
            raise
    return ShardIndex.load(folder.out)


def _write_all(dataset: Dataset, folder: OutputFolder, rows: list[np.ndarray], workers: int, resize: int | None,
               advance: Callable[[int], None]) -> ShardIndex:
    jobs = (ShardJob(folder.url, f"shard-{number:05d}", [dataset.samples[r] for r in positions], positions, resize)
            for number, positions in enumerate(rows))
    done: dict[str, Shard] = {}
    for shard in _run_parallel(jobs, workers or min(32, 2 * (os.cpu_count() or 1))):
        done[shard.name] = shard
        advance(shard.count)
    index = ShardIndex(folder.url, dataset.classes, [done[name] for name in sorted(done)], dataset.split, dataset.kind,
                       dataset.class_ids, dataset.source)
    sidecar = SidecarWriter(index, SIDECAR_NAME, dataset.labels.unlisted, dataset.source)
    for number, positions in enumerate(rows):
        sidecar.write(number, dataset.labels.take(positions))
    sidecar.close()
    if dataset.skipped:
        storage.write_atomic(storage.join(folder.url, SKIPPED_NAME), "\n".join([*dataset.skipped, ""]).encode())
    index.save()
    return index


@dataclass(frozen=True)
class ShardJob:
    """Everything one worker needs to write one shard."""

    folder: str
    stem: str
    samples: list[Sample]
    positions: np.ndarray
    resize: int | None

    def run(self) -> Shard:
        url = storage.join(self.folder, self.stem + ".tar")
        if storage.is_local(url):
            with open(storage.local_path(url), "wb", buffering=1 << 20) as file:
                offsets, sizes, total = self._fill(file)
        else:
            buffer = io.BytesIO()
            offsets, sizes, total = self._fill(buffer)
            storage.write_atomic(url, buffer.getbuffer())
        extensions = [self._extension(sample) for sample in self.samples]
        members = Members([s.key for s in self.samples], extensions, offsets, sizes, self.positions)
        table = storage.join(self.folder, "members", self.stem + ".npz")
        storage.write_atomic(table, members.to_bytes(), durable=False)
        return Shard(self.stem + ".tar", len(self.samples), total)

    def _fill(self, file: BinaryIO) -> tuple[np.ndarray, np.ndarray, int]:
        tar = TarWriter(file)
        offsets, sizes = np.zeros(len(self.samples), np.int64), np.zeros(len(self.samples), np.int64)
        for row, sample in enumerate(self.samples):
            data = read_source(sample)
            if self.resize is not None:
                data = shrink_to_jpeg(data, self.resize, str(sample.source))
            offsets[row] = tar.add(f"{sample.key}.{self._extension(sample)}", data)
            sizes[row] = len(data)
        return offsets, sizes, tar.close()

    def _extension(self, sample: Sample) -> str:
        return sample.extension if self.resize is None else "jpg"


def read_source(sample: Sample) -> bytes:
    """The sample's bytes as they are."""
    try:
        return storage.read_bytes(sample.source) if isinstance(sample.source, str) else sample.source.read()
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(f"sample {sample.key}: cannot read {sample.source} ({type(error).__name__}). Restore the file "
                        "or the right to read it, then run the command again.") from None


def _run_parallel(jobs: Iterator[ShardJob], workers: int) -> Iterator[Shard]:
    """Shards as they finish; only a few jobs are in flight, so that nine million samples are never listed at once.

    Threads, because copying waits for files and Pillow works outside the interpreter lock: on 2 cores they copied twice
    as fast as processes (which must be sent the samples) and resized 1.5 times as fast.
    """
    pool = ThreadPoolExecutor(workers)
    flying: set[Future[Shard]] = set()
    try:
        for job in jobs:
            flying.add(pool.submit(job.run))
            if len(flying) >= 2 * workers:
                finished, flying = wait(flying, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        while flying:
            finished, flying = wait(flying, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    finally:
        pool.shutdown(cancel_futures=True)


def _refuse_bad_dataset(dataset: Dataset) -> None:
    count = len(dataset.samples)
    if not count:
        raise UserError(f"the dataset is empty: no sample found for split {dataset.split!r}"
                        f"{f', {len(dataset.skipped):,} were skipped' if dataset.skipped else ''}. "
                        "Check the paths and the split.")
    if not dataset.classes:
        raise UserError("the dataset has no class. Check the class list.")
    assert len(dataset.labels) == count, f"{count} samples, {len(dataset.labels)} label rows"
    dataset.labels.check(len(dataset.classes), f"labels of split {dataset.split!r}")


def _mean_bytes(samples: Sequence[Sample], resize: int | None) -> float:
    """Estimated bytes a sample, from a few probes."""
    rows = np.unique(np.linspace(0, len(samples) - 1, min(_PROBES, len(samples))).astype(np.int64))
    with ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(_source_bytes, [samples[r] for r in rows]))
    mean = float(np.mean(sizes))
    # A JPEG of that quality has about a fifth of a byte per pixel and colour.
    return mean if resize is None else min(mean, 0.2 * 3 * resize * resize * 4 / 3)


def _source_bytes(sample: Sample) -> int:
    if not isinstance(sample.source, str):
        return len(sample.source.read())
    try:
        return storage.size(sample.source)
    except FileNotFoundError:
        return len(read_source(sample))


def _refuse_small_disk(folder: OutputFolder, needed: int) -> None:
    if folder.local and shutil.disk_usage(folder.url).free < needed:
        raise UserError(_full_disk(folder.url, needed))


def _full_disk(path: str, needed: int) -> str:
    free = f"{shutil.disk_usage(path).free / 1e9:,.2f} GB are free" if os.path.isdir(path) else "the storage is full"
    return (f"{path}: no space left: the dataset needs about {needed:,} bytes ({needed / 1e9:,.2f} GB), {free}. "
            "Free some space, choose another --out, or shrink the images with --resize.")
