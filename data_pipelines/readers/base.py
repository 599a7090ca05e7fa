"""What every reader hands to packing, and the small parts that readers share.

A reader turns a public dataset into a `Dataset`: samples in the source's own order (annotation protocols draw in
that order) and their labels as one SparseLabels over that order. Nothing is decoded, and nothing is copied yet.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.npy_header import alone
from lacuna.basics.whole_number import whole_number
from lacuna.data_pipelines.labels import SparseLabels

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


class Payload(Protocol):
    """Bytes that are not simply a file: picklable, read where the shard is written."""

    def read(self) -> bytes: ...


@dataclass(frozen=True)
class Sample:
    key: str  # unique in the dataset; no dot after the last slash, since WebDataset cuts names there
    source: str | Payload  # path or URL of the file, or an object that makes the bytes
    extension: str  # of the member in the tar, without the dot


@dataclass(frozen=True)
class Dataset:
    """A public dataset as packing wants it; `samples[i]` has the labels of row i."""

    classes: list[str]
    samples: Sequence[Sample]
    labels: SparseLabels
    split: str
    class_ids: list[str] = field(default_factory=list)
    kind: str = "image"
    source: dict = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)  # one line a sample that was left out, and why

    def take(self, rows: np.ndarray, skipped: list[str]) -> Dataset:
        """Only the given rows; `skipped` says what became of the others."""
        return dataclasses.replace(self, samples=[self.samples[r] for r in rows], labels=self.labels.take(rows),
                                   skipped=self.skipped + skipped)


def file_sample(url: str, name: str) -> Sample:
    """The sample of one image file; its key is `name` (a relative path) without the extension."""
    extension = image_extension(name)  # first: what has one names a file, so that there is a key
    return Sample(sample_key(name), url, extension)


def sample_key(name: str) -> str:
    """A relative path as a key: no extension, forward slashes, and no dot that WebDataset would cut at."""
    *folders, base = (part for part in name.replace("\\", "/").split("/") if part not in ("", ".", ".."))
    return "/".join([*folders, posixpath.splitext(base)[0].replace(".", "_")])


def image_extension(name: str) -> str:
    extension = posixpath.splitext(name)[1].lstrip(".").lower()
    if extension not in IMAGE_EXTENSIONS:
        raise UserError(f"{name}: extension {extension!r}, but shards hold {', '.join(IMAGE_EXTENSIONS)}. "
                        "Convert the file first.")
    return "jpg" if extension == "jpeg" else extension


def is_image(name: str) -> bool:
    return name.rsplit(".", 1)[-1].lower() in IMAGE_EXTENSIONS


def read_text(url: str) -> str:
    try:
        return storage.read_bytes(url).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(f"{url}: no such file. Check the path.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{url}: not UTF-8 text ({error}). Save it as UTF-8.") from None


def read_lines(url: str) -> list[str]:
    """Lines without their ends; trailing empty lines are dropped, so that line i stays sample i."""
    lines = read_text(url).splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def load_array(path: str) -> np.ndarray:
    """A .npy array; object arrays are refused, since loading them runs code from the file."""
    try:
        return alone(lambda: np.load(storage.local_path(path), allow_pickle=False, mmap_mode="r"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Check the path.") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path}: not a plain .npy array ({error}). Save it with numpy.save as numbers or as a "
                        "fixed-width text array (not dtype=object).") from None


def read_class_list(url: str) -> tuple[list[str], list[str]]:
    """(names, stable ids) from a text file: one class a line, `name` or `id<TAB>name`. Ids may be empty."""
    lines = [line.strip() for line in read_lines(url)]
    empty = [number for number, line in enumerate(lines, 1) if not line]
    if not lines or empty:
        raise UserError(f"{url}: {f'line {empty[0]} is empty' if lines else 'empty'}; expected one class a line "
                        "(`name`, or `id<TAB>name`).")
    if "\t" not in lines[0]:
        return lines, []
    pairs = [line.split("\t", 1) for line in lines]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise UserError(f"{url}:{number}: {pair[0]!r} has no tab, but line 1 has. Write `id<TAB>name` everywhere.")
    return [name.strip() for _, name in pairs], [id_.strip() for id_, _ in pairs]


class ClassNames:
    """Finds a class by index (an integer 0..L-1), by stable id, or by name."""

    def __init__(self, classes: list[str], class_ids: list[str]):
        self.size = len(classes)
        self._by_text: dict[str, int] = {}
        self._twice: set[str] = set()
        for texts in (class_ids, classes):
            for index, text in enumerate(texts):
                if self._by_text.setdefault(text, index) != index:
                    self._twice.add(text)

    def index(self, text: str | int, where: str) -> int:
        """The class index of one token; a UserError that starts with `where` if there is none."""
        token = str(text).strip()
        index = whole_number(token)
        if index is not None or whole_number(token.removeprefix("-")) is not None:
            if index is None or index >= self.size:
                raise UserError(f"{where}: class id {token}, but the class list has ids 0..{self.size - 1}. "
                                "Fix the label or the class list.")
            return index
        if token in self._twice:
            raise UserError(f"{where}: {token!r} names more than one class; give its index 0..{self.size - 1} instead.")
        if token not in self._by_text:
            raise UserError(f"{where}: {token!r} is no class; the list has {self.size} classes such as "
                            f"{', '.join(map(repr, list(self._by_text)[:3]))}. Fix the label or the class list.")
        return self._by_text[token]

    def indices(self, text: str, where: str) -> list[int]:
        """All classes of one field: a single name, or tokens parted by commas, else by white space."""
        text = text.strip().removeprefix("[").removesuffix("]").strip()
        if not text:
            return []
        if text in self._by_text:
            return [self.index(text, where)]
        tokens = text.split(",") if "," in text else text.split()
        return [self.index(token.strip().strip("'\""), where) for token in tokens if token.strip()]


def refuse_conflict(positives: Iterable[int], negatives: Iterable[int], where: str) -> None:
    both = set(positives) & set(negatives)
    if both:
        raise UserError(f"{where}: class id {min(both)} is listed as positive and as negative. Remove one of the two.")


def without_missing(dataset: Dataset, skip: bool, option: str = "--images") -> Dataset:
    """The dataset without samples whose file does not exist; they are an error unless `skip`."""
    found = existing([sample.source for sample in dataset.samples if isinstance(sample.source, str)])
    missing = np.array([row for row, sample in enumerate(dataset.samples)
                        if isinstance(sample.source, str) and sample.source not in found], np.int64)
    if not len(missing):
        return dataset
    names = [str(dataset.samples[r].source) for r in missing]
    if not skip:
        raise UserError(f"{len(missing):,} of {len(dataset.samples):,} image files do not exist, first: "
                        f"{', '.join(names[:3])}. Check {option}, or leave them out with --skip-missing.")
    keep = np.setdiff1d(np.arange(len(dataset.samples)), missing)
    return dataset.take(keep, [f"{name}\tno such file" for name in names])


def first_existing(places: list[list[str]]) -> list[str]:
    """Of each list of URLs the first whose file exists, else the first."""
    chosen = [some[0] for some in places]
    open_rows = list(range(len(places)))
    for turn in range(max(map(len, places), default=0)):
        asked = [row for row in open_rows if turn < len(places[row])]
        found = existing([places[row][turn] for row in asked])
        for row in asked:
            if places[row][turn] in found:
                chosen[row] = places[row][turn]
        open_rows = [row for row in open_rows if turn + 1 < len(places[row]) and places[row][turn] not in found]
    return chosen


def existing(urls: list[str]) -> set[str]:
    """Those of the URLs whose files exist.

    One listing per folder rather than one question per file: 82,000 HEAD requests would take an hour.
    """
    folders: dict[str, list[str]] = {}
    for url in urls:
        folders.setdefault(url.rpartition("/")[0], []).append(url)
    found: set[str] = set()
    for folder, inside in folders.items():
        names = names_in(folder)
        if names is None:
            found.update(url for url, ok in zip(inside, exist(inside), strict=True) if ok)
        else:
            found.update(url for url in inside if url.rpartition("/")[2] in names)
    return found


def names_in(folder: str) -> set[str] | None:
    """Names of the files of a folder that can be opened; None where the storage cannot list (plain HTTP)."""
    if folder.startswith(("http://", "https://")):
        return None
    if not storage.is_local(folder):
        return set(storage.list_names(folder))
    try:
        with os.scandir(storage.local_path(folder) or ".") as entries:
            return {entry.name for entry in entries if leads_somewhere(entry)}
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a zero byte is nobody's
        return set()


def leads_somewhere(entry: os.DirEntry) -> bool:
    """False for a link whose target is gone: it has a name, but no bytes."""
    return not entry.is_symlink() or os.path.exists(entry.path)


def exist(urls: list[str]) -> list[bool]:
    """Whether each file exists, asked one by one: the only way over plain HTTP."""
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(storage.exists, urls))


def walk_images(root: str) -> tuple[list[str], list[str]]:
    """(images, other files) below a local folder as sorted relative paths; links to folders are followed.

    Hidden files are others: macOS leaves a `._name.jpg` that is no picture beside every copied one.
    """
    images: list[str] = []
    others: list[str] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in names:
            path = name if relative == "." else f"{relative}/{name}"
            (images if is_image(name) and not name.startswith(".") else others).append(path)
    return sorted(images), sorted(others)


def require_folder(path: str, option: str) -> str:
    """The local path of an existing folder, without a slash at its end."""
    local = storage.local_path(path)
    if not os.path.isdir(local):
        raise UserError(f"{option} {path}: no such folder. Check the path.")
    return local.rstrip("/") or "/"
