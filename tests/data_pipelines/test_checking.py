"""Proves that `check` passes a sound dataset and names shard, row and key of every kind of damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lacuna.basics import storage
from lacuna.data_pipelines.checking import check
from lacuna.data_pipelines.index import ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import features, folder
from lacuna.data_pipelines.shard_tables import Members
from tests.helpers.pictures import write_pictures


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("check")
    write_pictures(root / "images", [f"{kind}/{number}.jpg" for kind in "ab" for number in range(6)])
    pack(folder.read(str(root / "images")), str(root / "out"), Layout(streams=3, rows_per_shard=4))
    return root / "out"


@pytest.fixture
def copy(sound, tmp_path) -> ShardIndex:
    shutil.copytree(sound, tmp_path / "out")
    return ShardIndex.load(str(tmp_path / "out"))


def patch(index: ShardIndex, shard: int, offset: int, data: bytes) -> None:
    with open(index.shard_url(shard), "r+b") as file:
        file.seek(offset)
        file.write(data)


def places(report):
    return [(p.shard, p.row, p.key) for p in report.problems]


def test_sound_dataset(copy):
    report = check(copy.url)
    assert report.problems == []
    assert report.warnings == []
    assert (report.samples, report.shards, report.sidecars) == (12, 3, ["labels"])


def test_corrupt_picture_is_named(copy):
    members = copy.members(1)
    patch(copy, 1, int(members.offsets[2]), b"rubbish!")
    report = check(copy.url)
    assert places(report) == [("shard-00001.tar", 2, members.keys[2])]
    assert "cannot be decoded" in report.problems[0].problem
    assert check(copy.url, decode=False).problems == []


def test_renamed_and_shifted_members(copy):
    members = copy.members(0)
    name = f"{members.keys[3]}.jpg".encode()
    header = bytearray(storage.read_bytes(copy.shard_url(0))[int(members.offsets[3]) - 512 : int(members.offsets[3])])
    header[: len(name)] = name.replace(b"a", b"z").replace(b"b", b"z")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    patch(copy, 0, int(members.offsets[3]) - 512, bytes(header))
    report = check(copy.url)
    assert places(report) == [("shard-00000.tar", 3, members.keys[3])]
    assert "the tar has 'z/" in report.problems[0].problem


def test_table_that_does_not_fit(copy):
    members = copy.members(0)
    offsets = members.offsets.copy()
    offsets[1] += 512
    table = Members([members.keys[0], *members.keys[:1], *members.keys[2:]], members.extensions, offsets, members.sizes,
                    members.positions)
    storage.write_atomic(copy.members_url(0), table.to_bytes())
    text = [str(p) for p in check(copy.url).problems]
    assert any("row 1" in line and "same key as row 0" in line for line in text)
    assert any("row 1" in line and "no member of the tar starts at byte" in line for line in text)
    assert any("1 samples that the index does not know" in line for line in text)


def test_wrong_size_in_the_table(copy):
    members = copy.members(2)
    sizes = members.sizes + np.array([0, 1, 0, 0])
    storage.write_atomic(copy.members_url(2), Members(members.keys, members.extensions, members.offsets, sizes,
                                                      members.positions).to_bytes())
    report = check(copy.url)
    assert places(report) == [("shard-00002.tar", 1, members.keys[1])]
    assert f"of {int(members.sizes[1]) + 1:,}" in report.problems[0].problem


def test_truncated_and_absent_tars(copy):
    data = storage.read_bytes(copy.shard_url(0))
    storage.write_atomic(copy.shard_url(0), data[: int(copy.members(0).offsets[2]) + 10])
    storage.remove([copy.shard_url(2)])
    text = [str(p) for p in check(copy.url).problems]
    assert any(t.startswith("shard-00000.tar: ") and "index.json says" in t for t in text)
    key = copy.members(0).keys[2]
    assert any(t.startswith(f"shard-00000.tar row 2 key {key!r}: ") and "truncated inside member" in t for t in text)
    assert any(t.startswith("shard-00000.tar: ") and "truncated" in t for t in text)
    assert any(t.startswith("shard-00002.tar: ") and "no such file" in t for t in text)
    assert not any(t.startswith("shard-00001") for t in text)


def test_damaged_sidecars(copy):
    writer = SidecarWriter(copy, "second", UNKNOWN, {})
    for shard in range(3):
        writer.write(shard, SparseLabels.from_lists([[0]] * 4, [[1]] * 4))
    writer.close()
    path = Path(copy.url, "labels/second.json")
    body = json.loads(path.read_text())
    body["positives"][0] += 1
    path.write_text(json.dumps(body))
    Path(copy.url, "labels/labels/shard-00001.npz").write_bytes(b"x")
    text = [str(p) for p in check(copy.url).problems]
    assert len(text) == 2
    assert "shard-00001.tar" in text[0]
    assert "does not fit labels/labels.json" in text[0]
    assert "labels/second.json: its positives per class" in text[1]


def test_label_out_of_range(copy):
    """A sidecar whose hashes are right but whose ids are not."""
    sidecar = Sidecar.load(copy, "labels")
    wider = ShardIndex(copy.url, [*copy.classes, "third"], copy.shards)
    writer = SidecarWriter(wider, "wide", UNKNOWN, {})
    for shard in range(3):
        writer.write(shard, SparseLabels.from_lists([[2]] * 4, [[]] * 4) if shard == 1 else sidecar.labels(shard))
    writer.close()
    path = Path(copy.url, "labels/wide.json")
    path.write_text(path.read_text().replace(wider.fingerprint, copy.fingerprint))
    text = [str(p) for p in check(copy.url).problems]
    assert any("shard-00001.tar" in t and "row 0 has positive class id 2" in t for t in text)


def test_same_key_in_two_shards(copy):
    members = copy.members(1)
    keys = [copy.members(0).keys[0], *members.keys[1:]]
    storage.write_atomic(copy.members_url(1), Members(keys, members.extensions, members.offsets, members.sizes,
                                                      members.positions).to_bytes())
    report = check(copy.url, decode=False)
    assert any("same key in shard-00000.tar" in str(p) for p in report.problems)
    foreign = ShardIndex(copy.url, copy.classes, copy.shards, source={"made_by": "lacuna shards index"})
    foreign.save()
    report = check(copy.url, decode=False)
    assert any("same key in shard-00000.tar" in str(p) for p in report.warnings)
    assert not any("same key" in str(p) for p in report.problems)


def test_bad_feature_vectors(tmp_path):
    vectors = np.ones((6, 3), np.float32)
    vectors[4, 1] = np.nan
    np.save(tmp_path / "f.npy", vectors)
    np.save(tmp_path / "y.npy", np.ones((6, 1), np.int8))
    dataset = features.read(str(tmp_path / "f.npy"), str(tmp_path / "y.npy"))
    pack(dataset, str(tmp_path / "out"), Layout(streams=1, shuffle=False))
    assert places(check(str(tmp_path / "out"))) == [("shard-00000.tar", 4, "00000004")]
