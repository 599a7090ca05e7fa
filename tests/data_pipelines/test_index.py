"""Proves that index, member tables and sidecars survive a round trip, and that damage is refused with a remedy."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lacuna.basics import npy_header, storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Shard, ShardIndex, Sidecar, SidecarWriter, sidecar_names
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.shard_tables import Members, labels_from_bytes, labels_to_bytes


@pytest.fixture
def index(tmp_path):
    index = ShardIndex(str(tmp_path), ["cat", "dog"], [Shard("a.tar", 2, 10), Shard("b.tar", 1, 20)], "val",
                       class_ids=["n1", "n2"], source={"reader": "test"})
    for shard, keys in enumerate((["x/1", "é 2"], ["z"])):
        numbers = np.arange(len(keys))
        storage.write_atomic(index.members_url(shard), Members(keys, ["jpg"] * len(keys), numbers * 512, numbers + 1,
                                                               numbers[::-1]).to_bytes())
    index.save()
    return index


def labels_of(index, name="labels"):
    writer = SidecarWriter(index, name, UNKNOWN, {})
    writer.write(1, SparseLabels.from_lists([[1]], [[0]]))
    writer.write(0, SparseLabels.from_lists([[0], []], [[], [1]]))
    return writer.close()


def test_round_trip(index):
    loaded = ShardIndex.load(index.url)
    assert loaded == index
    assert loaded.fingerprint == index.fingerprint
    assert loaded.counts.tolist() == [2, 1]
    members = loaded.members(0)
    assert members.keys == ["x/1", "é 2"]
    assert members.positions.tolist() == [1, 0]
    assert members.offsets.dtype == np.int64


def test_sidecar_round_trip(index):
    sidecar = labels_of(index)
    assert sidecar.positives.tolist() == [1, 1]
    assert sidecar.negatives.tolist() == [1, 1]
    assert sidecar.labels(0).dense(2).tolist() == [[POSITIVE, UNKNOWN], [UNKNOWN, NEGATIVE]]
    assert sidecar_names(index) == ["labels"]
    assert labels_of(index, "again").fingerprint == sidecar.fingerprint


def test_edited_index_is_refused(index):
    path = storage.join(index.url, "index.json")
    body = json.loads(storage.read_bytes(path))
    body["shards"][0]["rows"] = 3
    storage.write_atomic(path, json.dumps(body).encode())
    with pytest.raises(UserError, match="fingerprint"):
        ShardIndex.load(index.url)
    body["shards"][0]["name"] = "../a.tar"
    storage.write_atomic(path, json.dumps(body).encode())
    with pytest.raises(UserError, match="not a file name"):
        ShardIndex.load(index.url)


@pytest.mark.parametrize(("text", "words"), [("{", "not valid JSON"), ("{}", "damaged"), ('{"version": 9}', "version")])
def test_damaged_index_names_file_and_remedy(index, text, words):
    storage.write_atomic(storage.join(index.url, "index.json"), text.encode())
    with pytest.raises(UserError, match=words) as caught:
        ShardIndex.load(index.url)
    assert "index.json" in str(caught.value)


def test_absent_index_and_sidecar(index, tmp_path):
    with pytest.raises(UserError, match="lacuna shards make"):
        ShardIndex.load(str(tmp_path / "nowhere"))
    labels_of(index)
    with pytest.raises(UserError, match=r"no label sidecar named 'other'; there are \['labels'\]"):
        Sidecar.load(index, "other")


def test_damaged_tables(index):
    sidecar = labels_of(index)
    storage.write_atomic(index.members_url(0), b"not a zip")
    with pytest.raises(UserError, match="damaged"):
        index.members(0)
    storage.remove([index.members_url(1)])
    with pytest.raises(UserError, match="missing"):
        index.members(1)
    storage.write_atomic(storage.join(index.url, "labels/labels/a.npz"), b"other bytes")
    with pytest.raises(UserError, match=r"does not fit labels/labels\.json"):
        sidecar.labels(0)


def test_member_columns_of_different_lengths(index):
    numbers = np.arange(2)
    data = Members(["a", "b"], ["jpg", "jpg"], numbers, numbers, np.arange(3)).to_bytes()
    with pytest.raises(UserError, match="different lengths"):
        Members.from_bytes(data, "table")


def test_sidecar_of_another_index_is_refused(index):
    labels_of(index)
    other = ShardIndex(index.url, ["cat", "cow"], index.shards)
    with pytest.raises(UserError, match="another index"):
        Sidecar.load(other, "labels")


def test_writer_refuses_wrong_rows_and_names(index):
    with pytest.raises(UserError, match="1 label rows for 2 samples"):
        SidecarWriter(index, "s", UNKNOWN, {}).write(0, SparseLabels.from_lists([[0]], [[]]))
    with pytest.raises(UserError, match="sidecar name"):
        SidecarWriter(index, "../s", UNKNOWN, {})


def test_headers_of_arrays_are_read_by_one_thread_at_a_time(monkeypatch):
    """Python 3.11 may fail in two at once, which looked like a damaged file."""
    data = labels_to_bytes(SparseLabels.from_lists([[0], [1, 2]], [[], []]))
    inside, most = [], []
    read = np.lib.format.read_array_header_1_0

    def watched(*args, **kwargs):
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()
        return read(*args, **kwargs)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", watched)
    npy_header._parsed.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: labels_from_bytes(data, "here", UNKNOWN), range(8)))
    assert max(most) == 1
    assert all(labels.pos_ids.tolist() == [0, 1, 2] for labels in found)
