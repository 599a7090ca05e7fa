"""CIFAR-100 from its python or binary archive (.tar.gz, or unpacked); images become PNGs, bit for bit.

The python version is a pickle. Unpickling may run any code the file names, so it is read by an unpickler that knows
only plain containers and the names that NumPy arrays are made of, and builds inert stand-ins for those.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import UNLISTED_WORDS
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, Sample

_PIXELS = 3 * 32 * 32


def configure(group) -> None:
    group.add_argument("--archive", required=True, metavar="FILE",
                       help="cifar-100-python.tar.gz, cifar-100-binary.tar.gz, or the unpacked folder")
    group.add_argument("--split", default="train", choices=["train", "test"], help="default: train")
    group.add_argument("--labels", default="fine", choices=["fine", "coarse"], help="100 or 20 classes (default: fine)")
    group.add_argument("--unlisted", choices=sorted(UNLISTED_WORDS), default="unknown",
                       help="what the other classes of an image are (default: unknown)")


def read(archive: str, split: str = "train", labels: str = "fine", unlisted: str = "unknown") -> Dataset:
    files = _read_files(archive, split)
    if f"{split}.bin" in files:
        pixels, ids, names = _from_binary(files, split, labels, archive)
    elif split in files and "meta" in files:
        pixels, ids, names = _from_python(files, split, labels, archive)
    else:
        raise UserError(f"--archive {archive}: holds neither {split}.bin nor {split} and meta; found "
                        f"{', '.join(sorted(files)) or 'none of CIFAR-100 files'}.")
    bad = np.flatnonzero((ids < 0) | (ids >= len(names)))
    if len(bad):
        raise UserError(f"{archive}: image {bad[0]} has class id {ids[bad[0]]}, legal: 0..{len(names) - 1}.")
    samples = [Sample(f"{split}-{row:05d}", CifarImage(one.tobytes()), "png") for row, one in enumerate(pixels)]
    sparse = SparseLabels.from_lists(ids[:, None], [[]] * len(ids), UNLISTED_WORDS[unlisted])
    return Dataset(names, samples, sparse, split, source={"reader": "cifar100", "archive": archive, "labels": labels})


@dataclass(frozen=True)
class CifarImage:
    """32×32 pixels as three planes; encoded where the shard is written."""

    planes: bytes

    def read(self) -> bytes:
        array = np.frombuffer(self.planes, np.uint8).reshape(3, 32, 32).transpose(1, 2, 0)
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(array)).save(buffer, "PNG")
        return buffer.getvalue()

    def __str__(self) -> str:
        return "a CIFAR-100 image"


def _read_files(archive: str, split: str) -> dict[str, bytes]:
    """The few files needed, by base name."""
    wanted = {split, f"{split}.bin", "meta", "fine_label_names.txt", "coarse_label_names.txt"}
    found: dict[str, bytes] = {}
    if os.path.isdir(archive):
        for name in wanted & set(os.listdir(archive)):
            with open(os.path.join(archive, name), "rb") as file:
                found[name] = file.read()
        return found
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                content = tar.extractfile(member) if os.path.basename(member.name) in wanted else None
                if content is not None:
                    found[os.path.basename(member.name)] = content.read()
    except FileNotFoundError:
        raise UserError(f"--archive {archive}: no such file or folder.") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"--archive {archive}: damaged, or not a tar ({error}). Download it again.") from None
    return found


def _from_binary(files: dict[str, bytes], split: str, labels: str,
                 archive: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Records of coarse id, fine id, 3072 pixels."""
    data, width = files[f"{split}.bin"], 2 + _PIXELS
    names_file = f"{labels}_label_names.txt"
    if len(data) % width or names_file not in files:
        what = f"{len(data):,} bytes are no multiple of {width}" if len(data) % width else f"{names_file} is missing"
        raise UserError(f"{archive}: {split}.bin: {what}. Download it again.")
    records = np.frombuffer(data, np.uint8).reshape(-1, width)
    ids = records[:, 1 if labels == "fine" else 0].astype(np.int64)
    return records[:, 2:], ids, files[names_file].decode().split()


def _from_python(files: dict[str, bytes], split: str, labels: str,
                 archive: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    body, meta = (_load_plain(files[name], f"{archive}: {name}") for name in (split, "meta"))
    try:
        ids = np.array([int(i) for i in body[f"{labels}_labels"]], dtype=np.int64)
        pixels = np.frombuffer(body["data"].raw(), np.uint8).reshape(len(ids), _PIXELS)
        return pixels, ids, [str(name) for name in meta[f"{labels}_label_names"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{archive}: not CIFAR-100's layout ({type(error).__name__}: {error}). "
                        "Download it again.") from None


class PlainArray:
    """Takes the place of numpy.ndarray: keeps the raw bytes and does nothing else."""

    def __init__(self, *ignored: object):
        self.state: tuple = ()

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def raw(self) -> bytes:
        _, shape, dtype, fortran, data = self.state
        if fortran or dtype.name not in ("u1", "|u1"):
            raise ValueError(f"array of {dtype.name} {shape}, expected uint8 in C order")
        return data.encode("latin-1") if isinstance(data, str) else bytes(data)


class PlainType:
    """Takes the place of numpy.dtype."""

    def __init__(self, name: object = "", *ignored: object):
        self.name = name

    def __setstate__(self, state: tuple) -> None:
        pass


def _bytes_from_text(text: str, encoding: str = "latin-1") -> bytes:
    """Takes the place of _codecs.encode, by which Python 3 writes bytes into an old pickle format."""
    return text.encode("latin-1")


class PlainUnpickler(pickle.Unpickler):
    """Containers, text, numbers and bytes; every other name in the file is refused."""

    _ALLOWED = {  # noqa: RUF012 - a constant table
        ("numpy.core.multiarray", "_reconstruct"): PlainArray, ("numpy._core.multiarray", "_reconstruct"): PlainArray,
        ("numpy", "ndarray"): PlainArray, ("numpy", "dtype"): PlainType, ("_codecs", "encode"): _bytes_from_text,
    }

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not plain data")
        return self._ALLOWED[module, name]


def _load_plain(data: bytes, where: str) -> dict:
    try:
        body = PlainUnpickler(io.BytesIO(data), encoding="latin-1").load()
    except Exception as error:  # damaged pickles raise almost anything
        raise UserError(f"{where}: refused ({type(error).__name__}: {error}). Download the archive again.") from None
    if not isinstance(body, dict):
        raise UserError(f"{where}: holds a {type(body).__name__}, expected a dict. Download the archive again.")
    return {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in body.items()}
