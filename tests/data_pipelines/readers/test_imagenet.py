"""Proves that every published form of ImageNet's labels ends in the same classes, in sorted-WNID order."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.io import savemat

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN
from lacuna.data_pipelines.readers import imagenet
from tests.helpers.annotations import VAL, WNIDS
from tests.helpers.pictures import write_pictures

DEVKIT = {1: "n02012849", 2: "n03126707", 3: "n01440764"}  # the devkit's order is another one
TRUTH = ["n03126707", "n01440764", "n02012849", "n03126707"]


@pytest.fixture
def val(tmp_path):
    write_pictures(tmp_path / "val", [f"{name}.JPEG" for name in VAL])
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(i, w, f"name of {w}", 0) for i, w in DEVKIT.items()] + [(1001, "n00001740", "entity", 3)]
    savemat(tmp_path / "meta.mat", {"synsets": np.array(rows, dtype=fields)})
    (tmp_path / "synsets.txt").write_text("".join(f"{w} crane, no. {w}\n" for w in reversed(WNIDS)))
    return tmp_path


def test_train_folders(tmp_path):
    write_pictures(tmp_path, [f"{w}/{w}_{i}.JPEG" for w in reversed(WNIDS) for i in (10, 2)])
    dataset = imagenet.read(str(tmp_path))
    assert dataset.class_ids == WNIDS
    assert [s.key for s in dataset.samples][:2] == ["n01440764/n01440764_10", "n01440764/n01440764_2"]
    assert dataset.labels.pos_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert dataset.labels.unlisted == UNKNOWN


FORMS = {
    "wnid a line": lambda: "".join(f"{w}\n" for w in TRUTH),
    "devkit id a line": lambda: "".join(f"{next(i for i, w in DEVKIT.items() if w == t)}\n" for t in TRUTH),
    "file and index": lambda: "".join(f"{n}.JPEG {WNIDS.index(t)}\n" for n, t in zip(VAL, TRUTH, strict=True)),
    "file and wnid": lambda: "".join(f"val/{n}.JPEG\t{t}\n" for n, t in reversed(list(zip(VAL, TRUTH, strict=True)))),
    "kaggle": lambda: "ImageId,PredictionString\n" + "".join(
        f"{n},{t} 85 1 499 272 {t} 1 2 3 4\n" for n, t in zip(VAL, TRUTH, strict=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_val_ground_truth(val, form):
    (val / "truth.txt").write_text(FORMS[form]())
    dataset = imagenet.read(str(val / "val"), "val", str(val / "truth.txt"), meta=str(val / "meta.mat"))
    assert dataset.class_ids == WNIDS, "inner nodes of WordNet are no classes"
    assert dataset.classes[0] == "name of n01440764"
    assert [s.key for s in dataset.samples] == VAL
    assert [WNIDS[i] for i in dataset.labels.pos_ids] == TRUTH


def test_devkit_ids_without_meta_are_refused(val):
    (val / "truth.txt").write_text("1\n2\n3\n1\n")
    with pytest.raises(UserError, match="--meta"):
        imagenet.read(str(val / "val"), "val", str(val / "truth.txt"), synsets=str(val / "synsets.txt"))


@pytest.mark.parametrize(("text", "words"), [
    ("1\n2\n3\n", "labels of 3 images, the folder has 4"),
    ("1\n2\n3\n4\n", r"truth\.txt:4: id 4, legal: 1\.\.3"),
    ("1\n2\nx\n4\n", r"truth\.txt:3: 'x'"),
    ("".join(f"{n} {7}\n" for n in VAL), r"truth\.txt:1: class index 7, legal: 0\.\.2"),
])
def test_bad_ground_truth(val, text, words):
    (val / "truth.txt").write_text(text)
    with pytest.raises(UserError, match=words):
        imagenet.read(str(val / "val"), "val", str(val / "truth.txt"), meta=str(val / "meta.mat"))


def test_flat_folder_needs_ground_truth(val):
    with pytest.raises(UserError, match="--ground-truth"):
        imagenet.read(str(val / "val"), "val")


def test_real_labels(val):
    """Entry i is image i + 1; an empty set excludes the image; everything unlisted is negative."""
    (val / "truth.txt").write_text(FORMS["wnid a line"]())
    (val / "real.json").write_text(json.dumps([[2], [], [0, 1], [1]]))
    dataset = imagenet.read(str(val / "val"), "val", str(val / "truth.txt"), synsets=str(val / "synsets.txt"),
                            real=str(val / "real.json"))
    assert [s.key for s in dataset.samples] == [VAL[0], VAL[2], VAL[3]]
    assert [dataset.labels.positives(r).tolist() for r in range(3)] == [[2], [0, 1], [1]]
    assert dataset.labels.unlisted == NEGATIVE
    assert dataset.skipped == [f"{VAL[1]}.JPEG\tempty ReaL set"]
    (val / "real.json").write_text(json.dumps([[2], [], [0, 7], [1]]))
    with pytest.raises(UserError, match=r"entry 2 has class ids \[0, 7\]"):
        imagenet.read(str(val / "val"), "val", str(val / "truth.txt"), real=str(val / "real.json"))
