"""Proves what the folder, tsv and features readers make of their inputs, and how they refuse bad ones."""

from __future__ import annotations

import io

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import features, folder, tsv
from lacuna.data_pipelines.readers.base import ClassNames, file_sample, sample_key
from tests.helpers.pictures import write_pictures


def test_folder(tmp_path):
    write_pictures(tmp_path, ["dog/b.jpg", "dog/a.JPEG", "cat/deep/x.y.png"])
    (tmp_path / "cat/notes.txt").write_text("no image")
    (tmp_path / "dog/._a.JPEG").write_text("what macOS leaves behind")
    (tmp_path / "empty").mkdir()
    dataset = folder.read(str(tmp_path))
    assert dataset.classes == ["cat", "dog", "empty"]
    assert [s.key for s in dataset.samples] == ["cat/deep/x_y", "dog/a", "dog/b"]
    assert [s.extension for s in dataset.samples] == ["png", "jpg", "jpg"]
    assert dataset.labels.dense(3)[0].tolist() == [POSITIVE, UNKNOWN, UNKNOWN]
    assert len(dataset.skipped) == 2
    assert folder.read(str(tmp_path), unlisted="negative").labels.dense(3)[2].tolist() == [NEGATIVE, POSITIVE, NEGATIVE]


def test_folder_errors(tmp_path):
    with pytest.raises(UserError, match="no subfolder"):
        folder.read(str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        folder.read(str(tmp_path / "nowhere"))


def test_keys_have_no_dot_that_webdataset_would_cut_at():
    assert sample_key("a.b/c.d.jpg") == "a.b/c_d"
    assert sample_key("../x/./a.jpg") == "x/a"
    assert sample_key("actor\\0001.jpg") == "actor/0001"
    for name in (".", "..", "a.jpg/..", "/", "", ".jpg"):
        with pytest.raises(UserError, match="extension ''"):
            file_sample("x", name)


@pytest.fixture
def table(tmp_path):
    write_pictures(tmp_path / "img", ["a.jpg", "b.jpg", "c.png"])
    (tmp_path / "classes.txt").write_text("/m/1\tcat\n/m/2\ttraffic light\n/m/3\tdog\n")

    def read(text, **options):
        (tmp_path / "table").write_text(text)
        return tsv.read(str(tmp_path / "table"), str(tmp_path / "classes.txt"), str(tmp_path / "img"), **options)

    return read


def lists(dataset):
    return [(s.key, dataset.labels.positives(r).tolist(), dataset.labels.negatives(r).tolist())
            for r, s in enumerate(dataset.samples)]


def test_tsv_takes_numbers_names_and_stable_ids(table):
    dataset = table("a.jpg\t0 2\t1\nb.jpg\ttraffic light\tcat,dog\nc.png\t\t/m/3\n")
    assert lists(dataset) == [("a", [0, 2], [1]), ("b", [1], [0, 2]), ("c", [], [2])]
    assert dataset.class_ids == ["/m/1", "/m/2", "/m/3"]
    assert dataset.labels.unlisted == UNKNOWN
    assert lists(table("path\tpositives\na.jpg\t2\n")) == [("a", [2], [])], "a header line"


def test_published_comma_tables(table):
    assert lists(table("a.jpg,0 2\nb.jpg,1\n")) == [("a", [0, 2], []), ("b", [1], [])]
    text = "a.jpg,\"['/m/1', '/m/3']\",\"['/m/2']\",train\nb.jpg,[],\"['/m/2']\",val\n"
    assert lists(table(text)) == [("a", [0, 2], [1])]
    assert lists(table(text, split="val")) == [("b", [], [1])]


@pytest.mark.parametrize(("text", "words"), [
    ("a.jpg\t0\nb.jpg\t3\n", r"table:2: class id 3, .*0\.\.2"),
    ("a.jpg\tcow\n", "table:1: 'cow' is no class"),
    ("a.jpg\t0 1\t1\n", "table:1: class id 1 is listed as positive and as negative"),
    ("\t0\n", "table:1: no path"),
    ("x.jpg\t0\n", r"1 of 1 image files do not exist.*x\.jpg.*--skip-missing"),
    ("x.bmp\t0\n", "extension 'bmp'"),
])
def test_tsv_errors_name_the_line(table, text, words):
    with pytest.raises(UserError, match=words):
        table(text)


def test_missing_files_can_be_left_out(table):
    dataset = table("x.jpg\t0\nb.jpg\t1\n", skip_missing=True)
    assert lists(dataset) == [("b", [1], [])]
    assert dataset.skipped[0].endswith("x.jpg\tno such file")


def test_ambiguous_name_is_refused():
    names = ClassNames(["crane", "crane", "cat"], ["n1", "n2", "n3"])
    assert names.indices("n2", "x") == [1]
    with pytest.raises(UserError, match="names more than one class"):
        names.indices("crane", "x")


@pytest.mark.parametrize("zeros", ["negative", "unknown"])
@pytest.mark.parametrize("block", [1, 7, 1 << 24])
def test_a_label_matrix_is_read_in_blocks(tmp_path, monkeypatch, block, zeros):
    """Whatever their size; the only -1 is in the last one."""
    monkeypatch.setattr(features, "_BLOCK_ENTRIES", block)
    matrix = np.random.default_rng(0).integers(0, 2, (11, 3)).astype(np.int8)
    matrix[10, 2] = -1
    np.save(tmp_path / "y.npy", matrix)
    labels, width = features.matrix_labels(str(tmp_path / "y.npy"), zeros)
    zero, minus = (UNKNOWN, NEGATIVE) if zeros == "unknown" else (NEGATIVE, UNKNOWN)
    assert width == 3
    assert labels.unlisted == UNKNOWN
    assert np.array_equal(labels.dense(3), np.select([matrix == 1, matrix == 0], [POSITIVE, zero], minus))
    matrix[9, 1] = 5
    np.save(tmp_path / "y.npy", matrix)
    with pytest.raises(UserError, match="row 9, column 1 is 5"):
        features.matrix_labels(str(tmp_path / "y.npy"), zeros)


def test_features_become_plain_npy_members(tmp_path):
    vectors = np.random.RandomState(0).randn(5, 7).astype(np.float32)
    matrix = np.array([[1, 0, -1], [0, 0, 1], [-1, -1, -1], [1, 1, 1], [0, 1, 0]], np.int8)
    np.save(tmp_path / "f.npy", vectors)
    np.save(tmp_path / "y.npy", matrix)
    dataset = features.read(str(tmp_path / "f.npy"), str(tmp_path / "y.npy"))
    assert dataset.kind == "feature"
    index = pack(dataset, str(tmp_path / "out"), Layout(streams=2))
    assert index.kind == "feature"
    for shard in range(len(index.shards)):
        members, labels = index.members(shard), Sidecar.load(index, "labels").labels(shard).dense(3)
        tar = (tmp_path / "out" / index.shards[shard].name).read_bytes()
        for row, position in enumerate(members.positions):
            data = tar[members.offsets[row] : members.offsets[row] + members.sizes[row]]
            assert np.array_equal(np.load(io.BytesIO(data), allow_pickle=False), vectors[position])
            assert np.array_equal(labels[row], matrix[position])


def test_feature_label_conventions(tmp_path):
    np.save(tmp_path / "f.npy", np.zeros((2, 4), np.float16))
    np.save(tmp_path / "y.npy", np.array([[1, 0, -1], [0, 1, 0]], np.float64))
    cole = features.read(str(tmp_path / "f.npy"), str(tmp_path / "y.npy"), zeros="unknown").labels.dense(3)
    assert cole.tolist() == [[POSITIVE, UNKNOWN, NEGATIVE], [UNKNOWN, POSITIVE, UNKNOWN]]
    np.save(tmp_path / "y.npy", np.array([[1, 0], [0, 1]]))
    full = features.read(str(tmp_path / "f.npy"), str(tmp_path / "y.npy")).labels
    assert full.unlisted == NEGATIVE
    assert len(full.neg_ids) == 0
    (tmp_path / "y.tsv").write_text("one.a\t0\t1\ntwo\t1\n")
    (tmp_path / "c.txt").write_text("cat\ndog\n")
    table = features.read(str(tmp_path / "f.npy"), str(tmp_path / "y.tsv"), str(tmp_path / "c.txt"))
    assert lists(table) == [("one_a", [0], [1]), ("two", [1], [])]


def test_feature_errors(tmp_path):
    f, y = str(tmp_path / "f.npy"), str(tmp_path / "y.npy")
    np.save(f, np.zeros((2, 4), np.float32))
    np.save(y, np.array([[1, 0], [3, 1]]))
    with pytest.raises(UserError, match=r"row 1, column 0 is 3; legal: 1, 0, -1"):
        features.read(f, y)
    np.save(y, np.zeros((3, 2)))
    with pytest.raises(UserError, match="labels of 3 rows"):
        features.read(f, y)
    np.save(y, np.array([{"code": "run me"}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"not a plain \.npy array"):
        features.read(f, y)
    np.save(f, np.zeros(3, np.float32))
    with pytest.raises(UserError, match=r"expected floats \[N, D\]"):
        features.read(f, y)
