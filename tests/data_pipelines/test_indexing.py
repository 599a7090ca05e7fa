"""Proves that tars made elsewhere are indexed as WebDataset reads them, and that bad ones are named with a remedy."""

from __future__ import annotations

import io
import json
import tarfile
import time

import pytest
import webdataset

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.indexing import IndexOptions, index_tars
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN
from tests.helpers.pictures import picture

JPEG = picture(0)


def tar_bytes(members, form=tarfile.USTAR_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    def write(*tars, **options):
        for number, members in enumerate(tars):
            (tmp_path / f"set-{number}.tar").write_bytes(tar_bytes(members))
        (tmp_path / "classes.txt").write_text("cat\ntraffic light\ndog\n")
        return index_tars(str(tmp_path), IndexOptions(**options))

    return write


def lists(index):
    sidecar = Sidecar.load(index, "labels")
    return {key: (sidecar.labels(s).positives(r).tolist(), sidecar.labels(s).negatives(r).tolist())
            for s in range(len(index.shards)) for r, key in enumerate(index.members(s).keys)}


def test_every_label_form(folder, tmp_path):
    index = folder(
        [("./a.jpg", JPEG), ("./a.cls", b"2"), ("b/c.JPEG", JPEG),
         ("b/c.json", b'{"positives": ["dog"], "negatives": [0]}'), ("b/c.seg.png", b"not read"),
         ("notes", b"not read")],
        [("d.json", b"[0, 2]"), ("d.png", JPEG), ("e.webp", JPEG), ("e.txt", b"traffic light\n"),
         ("f.jpg", JPEG), ("f.txt", b"cat, dog"), ("g.jpg", JPEG), ("g.json", b"1"),
         ("h.jpg", JPEG), ("h.cls", b"0 1")],
        classes=str(tmp_path / "classes.txt"), unlisted="negative")
    assert lists(index) == {"a": ([2], []), "b/c": ([2], [0]), "d": ([0, 2], []), "e": ([1], []), "f": ([0, 2], []),
                            "g": ([1], []), "h": ([0, 1], [])}
    assert ShardIndex.load(str(tmp_path)).classes == ["cat", "traffic light", "dog"]
    assert index.members(0).extensions == ["jpg", "JPEG"], "as written in the tar"
    assert index.members(1).positions.tolist() == [2, 3, 4, 5, 6], "running order"
    assert Sidecar.load(index, "labels").unlisted == NEGATIVE
    for shard in range(2):
        tar, members = storage.read_bytes(index.shard_url(shard)), index.members(shard)
        assert all(tar[o : o + n] == JPEG for o, n in zip(members.offsets, members.sizes, strict=True))


def test_tars_of_the_webdataset_writer(tmp_path):
    with webdataset.ShardWriter(str(tmp_path / "w-%04d.tar"), maxcount=3, verbose=0) as sink:
        for number in range(7):
            sink.write({"__key__": f"é{number}", "jpg": picture(number), "cls": number % 4})
    index = index_tars(str(tmp_path), IndexOptions())
    assert index.counts.tolist() == [3, 3, 1]
    assert index.classes == ["0", "1", "2", "3"], "without a list, classes are numbers"
    assert lists(index) == {f"é{n}": ([n % 4], []) for n in range(7)}
    assert Sidecar.load(index, "labels").unlisted == UNKNOWN
    tar, members = storage.read_bytes(index.shard_url(1)), index.members(1)
    assert tar[members.offsets[2] : members.offsets[2] + members.sizes[2]] == picture(5)


def test_remote_tars_are_streamed():
    url = f"memory://tars-{time.time_ns()}"
    members = [("a.jpg", JPEG), ("a.cls", b"1"), ("b.jpg", JPEG), ("b.cls", b"0")]
    storage.write_atomic(f"{url}/x.tar", tar_bytes(members))
    index = index_tars(url, IndexOptions())
    assert lists(ShardIndex.load(url)) == {"a": ([1], []), "b": ([0], [])}
    tar, table = storage.read_bytes(f"{url}/x.tar"), index.members(0)
    assert tar[table.offsets[1] : table.offsets[1] + table.sizes[1]] == JPEG


def test_chosen_label_member_and_unlabelled(folder):
    caption = json.dumps({"caption": "a cat"}).encode()
    members = [("a.jpg", JPEG), ("a.json", caption), ("a.txt", b"1")]
    with pytest.raises(UserError, match=r"key 'a' \(\.json\): keys \['caption'\].*--labels-from"):
        folder(members)
    assert lists(folder(members, labels_from="txt")) == {"a": ([1], [])}
    with pytest.raises(UserError, match=r"key 'b' has no .*--allow-unlabelled"):
        folder([("b.jpg", JPEG)])
    assert lists(folder([("b.jpg", JPEG)], allow_unlabelled=True)) == {"b": ([], [])}


@pytest.mark.parametrize(("members", "words"), [
    ([("../a.jpg", JPEG)], r"'\.\./a\.jpg' would be written outside"),
    ([("/etc/a.jpg", JPEG)], "would be written outside"),
    ([("a.cls", b"1")], "key 'a' has labels but no image"),
    ([("a.jpg", JPEG), ("a.png", JPEG), ("a.cls", b"1")], r"two images \(a\.jpg, a\.png\)"),
    ([("a.jpg", JPEG), ("a.cls", b"1"), ("b.jpg", JPEG), ("b.cls", b"1"), ("a.cls", b"2")], "key 'a' occurs twice"),
    ([("a.jpg", JPEG), ("a.cls", b"dog")], r"key 'a' \(\.cls\): 'dog' is no class id.*--classes"),
    ([("a.jpg", JPEG), ("a.cls", b"-1")], "'-1' is no class id"),
    ([("a.jpg", JPEG), ("a.json", b"{")], "not valid JSON"),
    ([("a.jpg", JPEG), ("a.json", b"[true]")], "expected a list of class ids"),
    ([("a.jpg", JPEG), ("a.json", b'{"positives": [1], "negatives": [1]}')], "class id 1 is listed as positive and as"),
    ([], "hold no sample"),
])
def test_bad_tars_leave_no_index(folder, tmp_path, members, words):
    with pytest.raises(UserError, match=words):
        folder(members)
    assert not (tmp_path / "index.json").exists()


def test_class_out_of_range(folder, tmp_path):
    with pytest.raises(UserError, match=r"key 'a' \(\.cls\): class id 3, .*0\.\.2"):
        folder([("a.jpg", JPEG), ("a.cls", b"3")], classes=str(tmp_path / "classes.txt"))


def test_truncated_or_packed_tars(tmp_path):
    with pytest.raises(UserError, match=r"no \.tar file"):
        index_tars(str(tmp_path), IndexOptions())
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"unpack a\.tar\.gz"):
        index_tars(str(tmp_path), IndexOptions())
    whole = tar_bytes([("a.jpg", JPEG), ("a.cls", b"1"), ("b.jpg", JPEG), ("b.cls", b"0")])
    (tmp_path / "a.tar").write_bytes(whole[: 512 + 100])
    with pytest.raises(UserError, match=r"a\.tar: truncated"):
        index_tars(str(tmp_path), IndexOptions())
