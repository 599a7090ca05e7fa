"""`lacuna import-scores` puts every row of a table where its sample is, in every format, and names what is wrong."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lacuna import state_store
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.subsets import Subset
from lacuna.tools.cli import main
from lacuna.tools.import_scores import new_store


@pytest.fixture(scope="module")
def index(digit_shards) -> ShardIndex:
    return ShardIndex.load(str(digit_shards / "train"))


@pytest.fixture
def table(index):
    """(keys in another order than the shards', scores float32, rows in shard order for comparison)"""
    keys = [key for shard in range(len(index.shards)) for key in index.members(shard).keys]
    scores = np.random.default_rng(0).random((len(keys), len(index.classes))).astype(np.float32)
    order = np.random.default_rng(1).permutation(len(keys))
    return np.array(keys)[order], scores[order], scores


def write(kind, folder, keys, scores, classes):
    path = folder / f"table.{kind.split('-')[0]}"
    if kind == "npz":
        np.savez_compressed(path, keys=keys, scores=scores, classes=np.array(classes))
    elif kind == "npy":
        np.save(path, scores)
        (folder / "keys.txt").write_text("\n".join(keys))
        (folder / "classes.txt").write_text("\n".join(classes))
        return [str(path), "--keys", str(folder / "keys.txt"), "--classes", str(folder / "classes.txt")]
    elif kind == "parquet":
        pq.write_table(pa.table({"key": list(keys), **{c: scores[:, i] for i, c in enumerate(classes)}}), path,
                       row_group_size=100)
    else:
        (folder / "classes.txt").write_text("\n".join(classes))
        pq.write_table(pa.table({"key": list(keys), "scores": scores.tolist()}), path)
        return [str(path), "--classes", str(folder / "classes.txt")]
    return [str(path)]


def stored(url, field="scores"):
    store = state_store.open(str(url))
    reader = store.reader("imported")
    return np.concatenate([reader.read_shard(field, shard) for shard in range(store.schema.shards)])


@pytest.mark.parametrize("kind", ["npz", "npy", "parquet", "parquet-list"])
def test_every_format(index, table, tmp_path, kind, capsys):
    keys, scores, expected = table
    extra = np.append(keys, "of-another-set"), np.vstack([scores, scores[:1]])
    arguments = write(kind, tmp_path, *extra, index.classes)
    out = tmp_path / "store"
    assert main(["import-scores", *arguments, "--shards", index.url, "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tables"] == {"scores": {"rows": len(keys) + 1, "unused": 1}}
    np.testing.assert_array_equal(stored(out), expected.astype(np.float16))


def test_columns_in_another_order_only_if_asked(index, table, tmp_path, capsys):
    keys, scores, expected = table
    backwards = write("npz", tmp_path, keys, scores[:, ::-1], index.classes[::-1])
    command = ["import-scores", *backwards, "--shards", index.url, "--out", str(tmp_path / "store"),
               "--dtype", "float32"]
    assert main(command) == 2
    assert "another order: column 0 is '9', the dataset's class 0 is '0'" in capsys.readouterr().err
    assert main([*command, "--reorder"]) == 0
    np.testing.assert_array_equal(stored(tmp_path / "store"), expected)
    assert main([*command, "--reorder"]) == 2
    assert "there is already a store" in capsys.readouterr().err


def broken(what, keys, scores, classes):
    keys, scores, classes = keys.copy(), scores.copy(), list(classes)
    if what == "nan":
        scores[7, 3] = np.nan
    elif what == "too large":
        scores[7, 3] = 1e6
    elif what == "missing":
        keys, scores = keys[2:], scores[2:]
    elif what == "twice":
        keys[5] = keys[9]
    elif what == "class":
        classes[4] = "cat"
    elif what == "class twice":
        classes[4] = classes[3]
    elif what == "width":
        scores = scores[:, :-1]
    return keys, scores, classes


@pytest.mark.parametrize(("what", "message"), [
    ("nan", "for class '3' is NaN, infinite or beyond float16"), ("too large", "infinite or beyond float16"),
    ("missing", "no row for 2 of 410 samples"), ("twice", "twice; 1 samples have several rows"),
    ("class", "it lacks '4', and has 'cat' that the dataset does not know"), ("class twice", "class '3' twice"),
    ("width", "10 classes for scores of shape (410, 9)"),
])
def test_what_is_wrong_is_named_and_can_be_repaired(index, table, tmp_path, capsys, what, message):
    keys, scores, expected = table
    command = ["--shards", index.url, "--out", str(tmp_path / "store")]
    assert main(["import-scores", *write("npz", tmp_path, *broken(what, keys, scores, index.classes)), *command]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "table.npz" in error
    assert main(["import-scores", *write("npz", tmp_path, keys, scores, index.classes), *command]) == 0
    np.testing.assert_array_equal(stored(tmp_path / "store"), expected.astype(np.float16))


def test_files_that_are_no_tables(index, table, tmp_path, capsys):
    keys, scores, _ = table
    np.save(tmp_path / "bare.npy", scores)
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.parquet").write_text("hello")
    pq.write_table(pa.table({"name": list(keys)}), tmp_path / "nokey.parquet")
    np.savez(tmp_path / "nameless.npz", keys=keys, scores=scores)
    np.savez(tmp_path / "empty.npz", keys=keys)
    for name, message in (("bare.npy", "--keys FILE"), ("text.npz", "no .npz file"),
                          ("empty.npz", "expected the arrays"),
                          ("gone.npy", "no such file"), ("text.parquet", "no .parquet file"),
                          ("nokey.parquet", "no column 'key'"),
                          ("nameless.npz", "--classes FILE"), ("table.csv", "a .parquet, .npz or .npy file")):
        assert main(["import-scores", str(tmp_path / name), "--shards", index.url, "--out", str(tmp_path / "s")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert name in error


def test_a_subset_may_be_all_that_the_table_has(index, table, tmp_path, capsys):
    shutil.copytree(index.url, tmp_path / "shards")  # the subset is this test's own
    index = ShardIndex.load(str(tmp_path / "shards"))
    assert main(["annotate", index.url, "--scheme", "val_split"]) == 0
    mask = np.concatenate([Subset.load(index, "train").mask(s) for s in range(len(index.shards))])
    keys, scores, expected = table
    order = {key: i for i, key in enumerate(keys)}
    listed = [key for shard in range(len(index.shards)) for key in index.members(shard).keys]
    rows = [order[key] for key, inside in zip(listed, mask, strict=True) if inside]
    arguments = write("npz", tmp_path, keys[rows], scores[rows], index.classes)
    command = ["import-scores", *arguments, "--shards", index.url, "--out", str(tmp_path / "store")]
    assert main(command) == 2
    assert main([*command, "--subset", "train"]) == 0
    np.testing.assert_array_equal(stored(tmp_path / "store"), (expected * mask[:, None]).astype(np.float16))


def test_a_store_that_a_kill_left_without_its_last_file_is_used(index, tmp_path):
    """The copy of the schema comes before the group's own metadata: a kill in between made the next import fail."""
    fields = [state_store.Field("scores", (3,), "float16")]
    new_store(str(tmp_path / "store"), index, fields)
    (tmp_path / "store" / "zarr.json").unlink()
    assert new_store(str(tmp_path / "store"), index, fields).snapshots() == []
    assert (tmp_path / "store" / "zarr.json").exists()
