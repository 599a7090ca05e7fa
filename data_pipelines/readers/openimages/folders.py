"""Which image lies in which folder, for nine million images.

Local folders are read entry by entry. Object storage is listed in 256 parts, by the first two digits of the image id,
several at a time; over plain HTTP, which cannot list, every image of a part is asked for. Parts of remote folders can
be kept as files, so that a listing that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.readers.base import exist, leads_somewhere, require_folder

PARTS = 256
NOWHERE = 65_535  # in a column of folder numbers
_LISTED_AT_ONCE = 8
_IMAGE_NAME = re.compile(r"[0-9a-f]{16}\.jpg")
_LISTS_BY_PREFIX = ("s3://", "s3a://", "gs://", "gcs://")


def hex_name(image: int) -> str:
    return f"{int(image):016x}"


class ImageFolders:
    """The folders of `--images`; where two hold an image, the later one counts."""

    def __init__(self, folders: list[str], listing: str | None):
        self._folders = [folder.rstrip("/") or "/" for folder in folders]
        self._kept = None if listing is None else KeptParts(listing)
        self._listed = [None if _cannot_list(folder) else self._list(folder) for folder in self._folders]

    def place(self, part: int, images: np.ndarray) -> np.ndarray:
        """uint16: the folder of each of these ascending ids, which all belong to one part, or NOWHERE."""
        place = np.full(len(images), NOWHERE, np.uint16)
        for number, (folder, listed) in enumerate(zip(self._folders, self._listed, strict=True)):
            there = self._asked(folder, part, images) if listed is None else listed[part]
            place[np.isin(images, there)] = number
        return place

    def _list(self, folder: str) -> list[np.ndarray]:
        """Ids of the folder's images, per part."""
        if folder.startswith(_LISTS_BY_PREFIX):
            with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
                return list(pool.map(lambda part: self._keep(
                    f"{folder} {part:02x}", lambda: _ids(storage.list_prefix(folder, f"{part:02x}"))), range(PARTS)))
        if storage.is_local(folder):
            # Entry by entry: the sorted list of nine million names would take a gigabyte.
            with os.scandir(require_folder(folder, "--images")) as entries:
                ids = _ids(entry.name for entry in entries if leads_somewhere(entry))
        else:
            ids = self._keep(folder, lambda: _ids(storage.list_names(folder)))
        return np.split(ids, np.searchsorted(ids >> np.uint64(56), np.arange(1, PARTS, dtype=np.uint64)))

    def _asked(self, folder: str, part: int, images: np.ndarray) -> np.ndarray:
        def ask() -> np.ndarray:
            return images[np.array(exist([f"{folder}/{hex_name(image)}.jpg" for image in images]), dtype=bool)]

        # Its answers hold for the images that were asked for, so these are part of the name.
        asked = hashlib.blake2b(images.tobytes(), digest_size=8).hexdigest()
        return self._keep(f"{folder} {part:02x} {asked}", ask)

    def _keep(self, name: str, find: Callable[[], np.ndarray]) -> np.ndarray:
        return find() if self._kept is None else self._kept.get(name, find)


class KeptParts:
    """Arrays of image ids as files of one folder, each written when it is whole."""

    def __init__(self, folder: str):
        self.folder = folder

    def get(self, name: str, find: Callable[[], np.ndarray]) -> np.ndarray:
        url = storage.join(self.folder, hashlib.blake2b(name.encode(), digest_size=12).hexdigest() + ".npy")
        if storage.exists(url):
            return self._load(url)
        ids = find()
        buffer = io.BytesIO()
        np.save(buffer, ids)
        storage.write_atomic(url, buffer.getvalue(), durable=False)
        return ids

    @staticmethod
    def _load(url: str) -> np.ndarray:
        try:
            ids = np.load(io.BytesIO(storage.read_bytes(url)), allow_pickle=False)
            if ids.dtype == np.uint64 and ids.ndim == 1:
                return ids
            problem = f"{ids.dtype} {ids.shape}"
        except (ValueError, EOFError, OSError) as error:
            problem = str(error)
        raise UserError(f"{url}: not a part of a listing ({problem}). Remove the file; it will be made again.")


def _cannot_list(folder: str) -> bool:
    return folder.startswith(("http://", "https://"))


def _ids(names: Iterable[str]) -> np.ndarray:
    """uint64, ascending."""
    return np.sort(np.fromiter((int(name[:16], 16) for name in names if _IMAGE_NAME.fullmatch(name)), np.uint64))
