"""Proves that both CIFAR-100 archives give the same pixels and labels, and that no code in a pickle ever runs."""

from __future__ import annotations

import io
import os
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.readers import cifar100

FINE, COARSE = [f"fine{i}" for i in range(5)], ["c0", "c1"]
PIXELS = np.random.RandomState(0).randint(0, 256, (4, 3072), dtype=np.uint8)
FINE_IDS, COARSE_IDS = [4, 0, 2, 2], [1, 0, 1, 1]


def python2_array(array: np.ndarray) -> bytes:
    """A uint8 matrix as Python 2's protocol 2 wrote it: bytes are text of the old kind (opcode T)."""
    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    rows, columns = array.shape
    data = array.tobytes()
    return (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R(K\x01"
            + b"J" + rows.to_bytes(4, "little") + b"J" + columns.to_bytes(4, "little") + b"\x86"
            + b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|")
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + len(data).to_bytes(4, "little") + data + b"tb")


def python2_pickle() -> bytes:
    def numbers(values):
        return b"](" + b"".join(b"K" + bytes([v]) for v in values) + b"e"

    def key(text):
        return b"U" + bytes([len(text)]) + text

    return (b"\x80\x02}(" + key(b"data") + python2_array(PIXELS) + key(b"fine_labels") + numbers(FINE_IDS)
            + key(b"coarse_labels") + numbers(COARSE_IDS) + b"u.")


def python_files(protocol: int | None) -> dict[str, bytes]:
    body = {b"data": PIXELS, b"fine_labels": FINE_IDS, b"coarse_labels": COARSE_IDS}
    meta = {"fine_label_names": FINE, "coarse_label_names": COARSE}
    return {"train": python2_pickle() if protocol is None else pickle.dumps(body, protocol),
            "meta": pickle.dumps(meta, protocol or 2)}


def binary_files() -> dict[str, bytes]:
    records = b"".join(bytes([c, f]) + p.tobytes() for c, f, p in zip(COARSE_IDS, FINE_IDS, PIXELS, strict=True))
    return {"train.bin": records, "fine_label_names.txt": "\n".join([*FINE, ""]).encode(),
            "coarse_label_names.txt": "\n".join(COARSE).encode()}


def archive(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"cifar-100/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def folder(path, files):
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return str(path)


@pytest.mark.parametrize("files", [python_files(None), python_files(2), python_files(4), binary_files()],
                         ids=["python2", "protocol2", "protocol4", "binary"])
@pytest.mark.parametrize("place", [archive, folder])
def test_every_form(tmp_path, files, place):
    source = place(tmp_path / "cifar", files)
    dataset = cifar100.read(source)
    assert dataset.classes == FINE
    assert dataset.labels.pos_ids.tolist() == FINE_IDS
    for sample, planes in zip(dataset.samples, PIXELS, strict=True):
        shown = np.asarray(Image.open(io.BytesIO(sample.source.read())))
        assert np.array_equal(shown.transpose(2, 0, 1).ravel(), planes)
    coarse = cifar100.read(source, labels="coarse", unlisted="negative")
    assert coarse.labels.dense(2).argmax(1).tolist() == COARSE_IDS


class Evil:
    def __reduce__(self):
        return os.mkdir, (Evil.target,)

    target = ""


def test_code_in_a_pickle_is_refused(tmp_path):
    Evil.target = str(tmp_path / "it ran")
    source = archive(tmp_path / "c.tar.gz", {**python_files(2), "train": pickle.dumps({"data": Evil()}, 2)})
    with pytest.raises(UserError, match=r"refused.*posix\.mkdir"):
        cifar100.read(source)
    assert not os.path.exists(Evil.target)


def test_damaged_archives(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        cifar100.read(str(tmp_path / "none"))
    (tmp_path / "bad").write_bytes(b"not a tar")
    with pytest.raises(UserError, match="not a tar"):
        cifar100.read(str(tmp_path / "bad"))
    with pytest.raises(UserError, match=r"neither test\.bin nor test and meta"):
        cifar100.read(archive(tmp_path / "a", python_files(2)), "test")
    short = binary_files()
    short["train.bin"] = short["train.bin"][:-1]
    with pytest.raises(UserError, match="no multiple of 3074"):
        cifar100.read(archive(tmp_path / "b", short))
    with pytest.raises(UserError, match="refused"):
        cifar100.read(archive(tmp_path / "c", {**python_files(2), "train": python_files(2)["train"][:50]}))
    odd = binary_files()
    odd["train.bin"] = b"\x00\x63" + odd["train.bin"][2:]
    with pytest.raises(UserError, match=r"class id 99, legal: 0\.\.4"):
        cifar100.read(archive(tmp_path / "d", odd))
