"""The per-shard tables, npz files of a few columns: where every row lies in its tar, and its sparse labels."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.npy_header import unpacked
from lacuna.data_pipelines.labels import SparseLabels

_MAX_UNPACKED = 1 << 31  # of one shard's table: two orders more than a large shard needs


@dataclass(frozen=True)
class Members:
    """Where every row of a shard lies in its tar."""

    keys: list[str]
    extensions: list[str]  # "jpg", "png", "webp", "npy", without the dot
    offsets: np.ndarray  # int64 [rows], first byte of the member's data
    sizes: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows], place of the sample in the reader's order, before the global shuffle

    def to_bytes(self) -> bytes:
        return _npz(keys=_text_array(self.keys), extensions=_text_array(self.extensions),
                    offsets=self.offsets.astype(np.int64), sizes=self.sizes.astype(np.int64),
                    positions=self.positions.astype(np.int64))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Members:
        a = _load_npz(data, where, ("keys", "extensions", "offsets", "sizes", "positions"))
        members = cls(_texts(a["keys"], where), _texts(a["extensions"], where), a["offsets"], a["sizes"],
                      a["positions"])
        if any(np.shape(column) != (len(members.keys),) for column in (
                members.extensions, members.offsets, members.sizes, members.positions)):
            raise UserError(f"{where}: its tables have different lengths. Rebuild it with `lacuna shards index`.")
        return members


def labels_to_bytes(labels: SparseLabels) -> bytes:
    return _npz(pos_ptr=labels.pos_ptr, pos_ids=labels.pos_ids, neg_ptr=labels.neg_ptr, neg_ids=labels.neg_ids)


def labels_from_bytes(data: bytes, where: str, unlisted: int) -> SparseLabels:
    a = _load_npz(data, where, ("pos_ptr", "pos_ids", "neg_ptr", "neg_ids"))
    for ptr, ids in ((a["pos_ptr"], a["pos_ids"]), (a["neg_ptr"], a["neg_ids"])):
        good = (ptr.ndim == ids.ndim == 1 and ptr.dtype.kind == ids.dtype.kind == "i" and len(ptr) >= 1
                and ptr[0] == 0 and ptr[-1] == len(ids) and bool((np.diff(ptr) >= 0).all()))
        if not good or len(ptr) != len(a["pos_ptr"]):
            raise UserError(f"{where}: row pointers do not fit the ids. Make the sidecar again.")
    return SparseLabels(a["pos_ptr"], a["pos_ids"], a["neg_ptr"], a["neg_ids"], unlisted)


def _npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _load_npz(data: bytes, where: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        return unpacked(data, names, _MAX_UNPACKED)
    except SystemError:  # the parser's fault, not the file's
        raise
    except Exception as error:  # zipfile and numpy raise many kinds for damaged bytes
        raise UserError(f"{where}: damaged ({type(error).__name__}: {error}). Rebuild it.") from None


def _text_array(texts: list[str]) -> np.ndarray:
    return np.frombuffer("\n".join(texts).encode(), dtype=np.uint8)


def _texts(array: np.ndarray, where: str) -> list[str]:
    try:
        text = array.astype(np.uint8).tobytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: names are not UTF-8 ({error}). Rebuild it with `lacuna shards index`.") from None
    return text.split("\n") if text else []
