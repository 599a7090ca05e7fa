"""Damaged or hostile tars, images, indexes, sidecars and annotation tables end in the documented errors, in time."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import DecodeError, decode_image, decode_vector
from lacuna.data_pipelines.index import ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.indexing import parse_labels
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers import openimages, tsv
from lacuna.data_pipelines.readers.base import ClassNames
from lacuna.data_pipelines.shard_tables import Members, labels_from_bytes, labels_to_bytes
from lacuna.data_pipelines.subsets import Subset
from lacuna.data_pipelines.tar_scan import scan
from tests.helpers.fuzzing import damaged_bytes, damaged_json, fuzz_all

CLASSES = ["cat", "dog", "tree"]
LABELS = SparseLabels.from_lists([[0], [1, 2], []], [[1], [], [0]], UNKNOWN)


def a_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, body in (("a.jpg", b"x" * 700), ("b/ä" + "c" * 120 + ".png", b"y" * 10), ("a.json", b"{}")):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def a_picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def a_vector() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(5, dtype=np.float32))
    return buffer.getvalue()


def members() -> Members:
    return Members(["a", "b", "c"], ["jpg", "jpg", "png"], np.array([512, 1536, 2560]), np.array([7, 8, 9]),
                   np.arange(3))


class Folder:
    """A valid dataset, in which one file at a time is damaged."""

    def __init__(self, path: Path):
        self.path = path
        index = ShardIndex.load(self._index(path))
        writer = SidecarWriter(index, "labels", UNKNOWN, {"scheme": "x"})
        writer.write(0, LABELS)
        writer.close()
        Subset.from_masks(index, "val", [np.array([True, False, True])], {}).save()
        self.index = index

    @staticmethod
    def _index(path: Path) -> str:
        from lacuna.data_pipelines.index import Shard

        index = ShardIndex(str(path), CLASSES, [Shard("shard-00000.tar", 3, 4096)], class_ids=["1", "2", "3"])
        index.save()
        return str(path)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def load(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)
        if name == "index.json":
            ShardIndex.load(str(self.path))
        elif name.startswith("labels"):
            Sidecar.load(self.index, "labels").labels(0)
        else:
            Subset.load(self.index, "val").mask(0)


def labels_dense(data: bytes) -> None:
    labels = labels_from_bytes(data, "x", UNKNOWN)
    labels.check(len(CLASSES), "x")
    labels.dense(len(CLASSES))


def written(path: Path, use):
    """From a function of a file to a function of bytes."""
    def attempt(data: bytes) -> object:
        path.write_bytes(data)
        return use(str(path))
    return attempt


def targets(tmp_path: Path) -> dict:
    folder = Folder(tmp_path / "set")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    (tmp_path / "mids.csv").write_text("/m/1,cat\n/m/2,dog\n/m/3,tree\n")
    table = b"a.jpg\tcat dog\ttree\nb.jpg\tdog\nc.png\t\tcat\n"
    verified = (b"ImageID,Source,LabelName,Confidence\n000a1249af2bc5f0,verification,/m/1,1\n"
                b"000a1249af2bc5f0,verification,/m/2,0\n0001eeaf4aed83f9,crowdsource-verification,/m/3,1\n")
    names = ClassNames(CLASSES, ["1", "2", "3"])
    tar, csv_file = tmp_path / "x.tar", tmp_path / "x.csv"
    return {
        "tar": (damaged_bytes(a_tar()), written(tar, lambda p: [m.read() for m in scan(p) if m.key_and_extension()])),
        "jpeg": (damaged_bytes(a_picture("JPEG")), decode_image),
        "png": (damaged_bytes(a_picture("PNG")), decode_image),
        "webp": (damaged_bytes(a_picture("WEBP")), decode_image),
        "vector": (damaged_bytes(a_vector()), decode_vector),
        "index": (damaged_json(folder.read("index.json")), lambda data: folder.load("index.json", data)),
        "members": (damaged_bytes(members().to_bytes()), lambda data: Members.from_bytes(data, "x")),
        "labels": (damaged_bytes(labels_to_bytes(LABELS)), labels_dense),
        "sidecar": (damaged_json(folder.read("labels/labels.json")), lambda d: folder.load("labels/labels.json", d)),
        "subset": (damaged_json(folder.read("subsets/val.json")), lambda d: folder.load("subsets/val.json", d)),
        "label member": (damaged_json(json.dumps({"positives": ["cat", 1], "negatives": [2]}).encode()),
                         lambda data: parse_labels(data, "json", "x", names)),
        "table": (damaged_bytes(table), written(csv_file, lambda p: tsv.read(p, str(tmp_path / "classes.txt")))),
        "openimages": (damaged_bytes(verified), written(csv_file, lambda p: openimages.read(
            [p], str(tmp_path / "mids.csv"), str(tmp_path)))),
    }


ALLOWED = (UserError, DecodeError)


def test_damaged_inputs(tmp_path):
    fuzz_all(targets(tmp_path), ALLOWED)


def test_tar_names_that_leave_the_folder_and_negative_sizes_are_refused(tmp_path):
    for name in ("../evil.jpg", "/etc/evil.jpg", "a/../../evil.jpg"):
        with tarfile.open(tmp_path / "evil.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo(name))
        with pytest.raises(UserError, match="outside its folder"):
            list(scan(str(tmp_path / "evil.tar")))
    # A size below zero would make a reader walk the same header for ever.
    info = tarfile.TarInfo("x")
    header = bytearray(info.tobuf(tarfile.PAX_FORMAT))
    header[156:157] = b"x"  # an extended header
    header[124:136] = b"\xff" * 11 + b"\x00"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    (tmp_path / "negative.tar").write_bytes(bytes(header) + bytes(1024))
    fuzz_once = written(tmp_path / "negative.tar", lambda p: list(scan(p)))
    with pytest.raises(UserError, match="not an uncompressed tar"):
        fuzz_once(bytes(header) + bytes(1024))


@pytest.mark.filterwarnings("ignore:Image size")
def test_bombs_are_refused_before_they_are_unpacked(monkeypatch):
    """Declared sizes are looked at first: pictures by their header, tables by the archive's own list."""
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    huge = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    plain = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", huge)
    # A reader that trusts the first chunk's place sees a small picture; the decoder would find the large one.
    hidden = b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt", struct.pack(">II", 5, 5) + b"note") + chunk(
        b"IHDR", struct.pack(">IIBBBBB", 12_500, 12_500, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(b"\0" * 100))
    for data in (plain, hidden):
        with pytest.raises(DecodeError, match="pixels allowed"):
            decode_image(data)
    monkeypatch.setattr("lacuna.data_pipelines.shard_tables._MAX_UNPACKED", 1 << 20)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, pos_ptr=np.zeros(1 << 18, np.int64), pos_ids=np.zeros(1, np.int32),
                        neg_ptr=np.zeros(1, np.int64), neg_ids=np.zeros(1, np.int32))
    assert len(buffer.getvalue()) < 10_000
    with pytest.raises(UserError, match="unpacked"):
        labels_from_bytes(buffer.getvalue(), "x", UNKNOWN)
