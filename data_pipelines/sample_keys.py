"""Keys of a dataset's samples: legal as member names of a tar, and each used once.

Two files of one folder may differ in nothing but their endings (`photo.jpg`, `photo.png`). Both then get the ending
into their keys (`photo_jpg`, `photo_png`), so that neither passes for the other, whatever order they are read in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
from collections.abc import Sequence

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.readers.base import Dataset, Sample

RENAMED = "keys_made_distinct"  # in the dataset's source: how many samples got another key


def distinct_keys(dataset: Dataset) -> Dataset:
    """The dataset with legal, different keys; a UserError where that takes a human."""
    prints = _prints(dataset.samples)
    _, first, counts = np.unique(prints, return_index=True, return_counts=True)
    if not (counts > 1).any():
        return dataset
    twice = np.flatnonzero(np.isin(prints, prints[first[counts > 1]]))
    samples = list(dataset.samples)
    _refuse_same_file([samples[row] for row in twice])
    taken = {sample.key for sample in samples}
    for row in sorted(twice.tolist(), key=lambda r: (samples[r].key, _place(samples[r]))):
        samples[row] = dataclasses.replace(samples[row], key=_free_key(samples[row], taken))
        taken.add(samples[row].key)
    return dataclasses.replace(dataset, samples=samples, source={**dataset.source, RENAMED: len(twice)})


def _prints(samples: Sequence[Sample]) -> np.ndarray:
    """uint64 [N]: 8 bytes per key instead of a set of strings: a set of nine million keys takes a gigabyte."""
    prints = np.zeros(len(samples), np.uint64)
    for row, sample in enumerate(samples):
        key = sample.key
        if not key or key.startswith("/") or "\n" in key or "." in key.rpartition("/")[2] or ".." in key.split("/"):
            raise UserError(f"sample key {key!r} (from {sample.source}): keys are relative, without a dot after the "
                            "last slash and without line breaks. Rename the file.")
        prints[row] = _print(sample)
    return prints


def _print(sample: Sample) -> int:
    try:
        return int.from_bytes(hashlib.blake2b(sample.key.encode(), digest_size=8).digest(), "big")
    except UnicodeEncodeError:
        raise UserError(f"sample {sample.key!r}: its name is not valid UTF-8. Rename the file.") from None


def _free_key(sample: Sample, taken: set[str]) -> str:
    """The key with the file's ending; with a number too, where even that is taken (`a.b.jpg` beside `a_b.jpg`)."""
    wanted = f"{sample.key}_{posixpath.splitext(_place(sample))[1].lstrip('.') or sample.extension}"
    key, number = wanted, 2
    while key in taken:
        key, number = f"{wanted}_{number}", number + 1
    return key


def _refuse_same_file(samples: list[Sample]) -> None:
    """A file that is listed twice has two rows of labels: nobody but the user knows which of them holds."""
    known: dict[tuple[str, str], Sample] = {}
    again = [(known[at], sample) for sample in samples
             if known.setdefault(at := (sample.key, _place(sample)), sample) is not sample]
    if again:
        a, b = again[0]
        raise UserError(f"{len(again):,} keys occur more than once, first {a.key!r} (from {a.source} and {b.source}). "
                        "A sample is listed once: remove one of the two.")


def _place(sample: Sample) -> str:
    """The file of a sample, however its path is written; "" for one that is made from something else."""
    if not isinstance(sample.source, str):
        return ""
    return posixpath.normpath(sample.source) if storage.is_local(sample.source) else sample.source
