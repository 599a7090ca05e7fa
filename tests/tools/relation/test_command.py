"""Proves that `lacuna relation` writes what SCPNet's code makes of a likeness, and counts as naive loops do."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.passes.scoring import ScoreJob
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.relation.smoothing import relation_of
from lacuna.trainer.relations import read_relation
from tests.helpers.labelled_shards import write_dataset
from tests.helpers.small_wordnet import write_wordnet

CLASSES = ["dog", "husky", "mouse", "kite", "unicorn"]


@pytest.fixture
def shards(tmp_path) -> str:
    """40 samples, of which the first ten have unknown labels."""
    draws = np.random.RandomState(0)
    truth = np.where(draws.rand(40, 5) < 0.4, POSITIVE, NEGATIVE).astype(np.int8)
    truth[:, 4] = NEGATIVE
    truth[:10][draws.rand(10, 5) < 0.3] = UNKNOWN
    write_dataset(str(tmp_path / "data"), truth, [25, 15], unlisted=UNKNOWN, classes=CLASSES)
    np.save(tmp_path / "truth.npy", truth)
    return str(tmp_path / "data")


def made(argv: list[str], tmp_path, *options: str) -> np.ndarray:
    out = str(tmp_path / "out.npz")
    assert main(["relation", *argv, "--out", out, *options]) == 0
    return read_relation(out, 5, CLASSES).numpy()


def scpnet(likeness: np.ndarray, top: int, share: float, temperature: float) -> np.ndarray:
    """As its authors' model file does it, entry by entry."""
    count = len(likeness)
    out = np.zeros((count, count))
    for i in range(count):
        kept = sorted(range(count), key=lambda j: -likeness[i, j])[:top]
        total = sum(likeness[i, j] for j in kept if j != i)
        r = [0.0] * count
        for j in kept:
            r[j] = share * likeness[i, j] / total
        r[i] = 1 - share
        first = [np.exp(r[j] / temperature) for j in range(count)]
        first = [value / sum(first) if j in kept else 0.0 for j, value in enumerate(first)]
        out[i] = [value / sum(first) for value in first]
    return out


@pytest.mark.parametrize(("top", "share", "temperature"), [(5, 0.2, 0.2), (3, 0.2, 0.3), (2, 0.5, 0.05)])
def test_the_authors_formula(top, share, temperature):
    vectors = np.random.RandomState(1).rand(5, 7)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    likeness = units @ units.T
    np.testing.assert_allclose(relation_of(likeness, top, share, temperature),
                               scpnet(likeness, top, share, temperature), atol=1e-12)


def test_golden_values():
    likeness = np.array([[1, 0.8, 0.2], [0.8, 1, 0.5], [0.2, 0.5, 1]])
    np.testing.assert_allclose(relation_of(likeness, None, 0.2, 0.2), [
        [0.940616, 0.038342, 0.021042], [0.031948, 0.942687, 0.025364], [0.022955, 0.035237, 0.941809]], atol=1e-6)
    np.testing.assert_allclose(relation_of(likeness, 2, 0.2, 0.0), [[0.8, 0.2, 0], [0.2, 0.8, 0], [0, 0.2, 0.8]])
    np.testing.assert_allclose(relation_of(np.diag([1.0, 1, 1]), None, 0.2, 0.2), np.eye(3))


def test_labels_that_are_known_together(shards, tmp_path):
    truth = np.load(tmp_path / "truth.npy")
    likeness = np.zeros((5, 5))
    for i, j in np.ndindex(5, 5):
        rows = [row for row in truth if row[i] == POSITIVE and row[j] != UNKNOWN]
        likeness[i, j] = np.mean([row[j] == POSITIVE for row in rows]) if rows else 0
    found = made(["labels", "--shards", shards], tmp_path, "--temperature", "0")
    np.testing.assert_allclose(found[:4, :4], scpnet_shares(likeness[:4, :4]), atol=1e-6)
    assert found[4].tolist() == [0, 0, 0, 0, 1]  # a class that was never seen keeps to itself


def scpnet_shares(likeness: np.ndarray) -> np.ndarray:
    others = likeness - np.diag(np.diag(likeness))
    return 0.2 * others / others.sum(1, keepdims=True) + 0.8 * np.eye(len(likeness))


def test_single_positives_tell_nothing(tmp_path, capsys):
    truth = np.full((6, 5), UNKNOWN, np.int8)
    truth[:, 2] = POSITIVE
    write_dataset(str(tmp_path / "single"), truth, [6], unlisted=UNKNOWN, classes=CLASSES)
    assert main(["relation", "labels", "--shards", str(tmp_path / "single"), "--out", str(tmp_path / "o.npz")]) == 2
    assert "a positive and a second known label" in capsys.readouterr().err


def test_scores_of_a_table(shards, tmp_path):
    keys = [f"{n:06d}" for n in range(40)]
    scores = np.random.RandomState(2).rand(40, 5).astype(np.float16)
    np.savez(tmp_path / "t.npz", keys=np.array(keys), scores=scores, classes=np.array(CLASSES))
    table = str(tmp_path / "table")
    assert main(["import-scores", str(tmp_path / "t.npz"), "--shards", shards, "--out", table]) == 0
    p = scores.astype(np.float64)
    likeness = np.array([[sum(p[:, i] * p[:, j]) / sum(p[:, i]) for j in range(5)] for i in range(5)])
    found = made(["beliefs", table, "--shards", shards], tmp_path, "--temperature", "0")
    np.testing.assert_allclose(found, scpnet_shares(likeness), atol=1e-6)


def test_names_and_hierarchies(shards, tmp_path, capsys):
    vectors = np.random.RandomState(3).rand(5, 4)
    np.savez(tmp_path / "t.text.npz", embeddings=vectors[::-1], classes=np.array(CLASSES[::-1]))
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = made(["text", str(tmp_path / "t.text.npz"), "--shards", shards], tmp_path, "--temperature", "0")
    np.testing.assert_allclose(found, scpnet_shares(units @ units.T), atol=1e-6)

    wordnet = write_wordnet(tmp_path / "wordnet")
    # depths: entity 1, animal and artifact 2, dog and mouse 3, husky 4, the kite of toys 3
    likeness = np.array([[0, 6 / 7, 4 / 6, 2 / 6], [6 / 7, 0, 4 / 7, 2 / 7], [4 / 6, 4 / 7, 0, 2 / 6],
                         [2 / 6, 2 / 7, 2 / 6, 0]])
    found = made(["hierarchy", "--wordnet", wordnet, "--shards", shards], tmp_path, "--temperature", "0")
    np.testing.assert_allclose(found[:4, :4], scpnet_shares(likeness), atol=1e-6)
    assert "have to do with no other: unicorn" in capsys.readouterr().out
    (tmp_path / "synsets.tsv").write_text("mouse\tn00000021\n")
    moved = made(["hierarchy", "--wordnet", wordnet, "--synsets", str(tmp_path / "synsets.tsv"), "--shards", shards],
                 tmp_path, "--temperature", "0")
    assert moved[2].argsort()[-2] == 3  # now a device, nearest to the toy

    tree = {"LabelName": "thing", "Subcategory": [
        {"LabelName": "animal", "Subcategory": [{"LabelName": "dog", "Subcategory": [{"LabelName": "husky"}]},
                                                {"LabelName": "mouse"}]}, {"LabelName": "kite"}]}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    (tmp_path / "tree.tsv").write_text("dog\tanimal\nhusky\tdog\nmouse\tanimal\nanimal\tthing\nkite\tthing\n")
    one = made(["hierarchy", "--hierarchy", str(tmp_path / "tree.json"), "--shards", shards], tmp_path)
    other = made(["hierarchy", "--parents", str(tmp_path / "tree.tsv"), "--shards", shards], tmp_path)
    np.testing.assert_allclose(one, other, atol=1e-7)
    assert one[0].argsort()[-2] == 1


def test_the_page_shows_every_class(shards, tmp_path, capsys):
    out = str(tmp_path / "out.npz")
    assert main(["relation", "labels", "--shards", shards, "--out", out, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    page = (tmp_path / "out.html").read_text()
    assert facts["page"] == str(tmp_path / "out.html")
    assert facts["without_neighbors"] == ["unicorn"]
    assert len(re.findall(r"<text ", page)) == 10
    assert "data:image/png;base64," in page


def test_a_relation_of_other_classes_is_refused(shards, tmp_path):
    out = str(tmp_path / "out.npz")
    assert main(["relation", "labels", "--shards", shards, "--out", out]) == 0
    with pytest.raises(UserError, match=r"its class 1 is 'husky', the data's is 'cat'. Make it again"):
        read_relation(out, 5, ["dog", "cat", "mouse", "kite", "unicorn"])


@pytest.mark.parametrize(("argv", "message"), [
    (["labels", "--out", "x.npy"], r"must end with \.npz"),
    (["labels", "--out", "x.npz", "--share", "2"], "--share 2.0: legal are"),
    (["labels", "--out", "x.npz", "--temperature", "-1"], "--temperature -1.0: legal are"),
    (["labels", "--out", "x.npz", "--neighbors", "9"], "--neighbors 9: there are 5 classes"),
    (["hierarchy", "--out", "x.npz"], "no hierarchy: give one of --wordnet DIR"),
    (["hierarchy", "--out", "x.npz", "--hierarchy", "none.json"], "--hierarchy none.json: no such file"),
    (["text", "none.npz", "--out", "x.npz"], "embeddings none.npz: cannot be read")])
def test_mistakes(shards, argv, message, capsys):
    assert main(["relation", *argv, "--shards", shards]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_beliefs_of_a_run(trained, tmp_path):
    """Over its training set, on Ray, against one product of matrices."""
    out = str(tmp_path / "out.npz")
    assert main(["relation", "beliefs", trained.full, "--out", out, "--temperature", "0", "--workers", "1"]) == 0
    source = ShardSource.load(str(trained.data / "train"), "labels", None)
    work = ScoreJob(open_trained(trained.full), source).build()
    p = np.concatenate([work(shard)["scores"] for shard in range(len(source.index.shards))]).astype(np.float64)
    expected = scpnet_shares((p.T @ p) / p.sum(0)[:, None])
    found = read_relation(out, 10, source.index.classes)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=1e-6, rtol=0)
