"""Proves the order and labels that the VOC, NUS-WIDE and CUB readers take from their text lists, quirks included."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.readers import cub, nuswide, voc


def positives(dataset):
    return {s.key: dataset.labels.positives(r).tolist() for r, s in enumerate(dataset.samples)}


def test_voc(voc_root):
    dataset = voc.read(str(voc_root))
    assert dataset.classes == ["cat", "dog"]
    assert positives(dataset) == {"2008_000002": [0, 1], "2008_000009": [0]}, "difficult alone does not count"
    assert list(positives(dataset)) == ["2008_000002", "2008_000009"], "sorted"
    assert dataset.labels.unlisted == NEGATIVE
    assert list(positives(voc.read(str(voc_root), all_images=True))) == ["2008_000002", "2008_000005", "2008_000009"]


def test_voc_errors(voc_root):
    with pytest.raises(UserError, match=r"no file <class>_val\.txt"):
        voc.read(str(voc_root), "val")
    (voc_root / "ImageSets/Main/dog_train.txt").write_text("2008_000009 2\n")
    with pytest.raises(UserError, match=r"dog_train\.txt:1: .*1, -1, 0"):
        voc.read(str(voc_root))
    with pytest.raises(UserError, match="no such folder"):
        voc.read(str(voc_root / "VOC2007"))


def test_nuswide_official(nus_root):
    dataset = nuswide.read(str(nus_root), str(nus_root / "Flickr"))
    assert dataset.classes == ["airport", "sky"]
    assert positives(dataset) == {"actor/0001_2": [0, 1], "zoo/0002_1": [0], "actor/0003_9": []}
    labelled = nuswide.read(str(nus_root), str(nus_root / "Flickr"), labelled_only=True)
    assert list(positives(labelled)) == ["actor/0001_2", "zoo/0002_1"]
    assert labelled.skipped == ["actor/0003_9.jpg\tno positive"]
    (nus_root / "Groundtruth/TrainTestLabels/Labels_sky_Train.txt").write_text("1\n0\n")
    with pytest.raises(UserError, match="2 lines, but the image list has 3"):
        nuswide.read(str(nus_root), str(nus_root / "Flickr"))
    (nus_root / "Groundtruth/TrainTestLabels/Labels_sky_Train.txt").write_text("1\n5\n0\n")
    with pytest.raises(UserError, match=r"Labels_sky_Train\.txt:2: '5'"):
        nuswide.read(str(nus_root), str(nus_root / "Flickr"))


def test_nuswide_npy(nus_root, tmp_path):
    folder = tmp_path / "npy"
    folder.mkdir()
    np.save(folder / "formatted_val_images.npy", np.array(["zoo/0002_1.jpg", "actor/0001_2.jpg"]))
    np.save(folder / "formatted_val_labels.npy", np.array([[0.0, 1.0, 0.0], [0, 0, 0]]))
    dataset = nuswide.read(str(folder), str(nus_root / "Flickr"), "val")
    assert positives(dataset) == {"zoo/0002_1": [1], "actor/0001_2": []}
    assert len(dataset.classes) == 3
    np.save(folder / "formatted_val_labels.npy", np.array([[0, 1, -1], [0, 0, 0]]))
    with pytest.raises(UserError, match="0/1 matrix"):
        nuswide.read(str(folder), str(nus_root / "Flickr"), "val")


def test_cub_attributes(cub_root):
    dataset = cub.read(str(cub_root))
    assert positives(dataset) == {"001.Black_footed/B_0046_18": [1], "002.Laysan/L_0003": [0, 1]}
    assert dataset.classes == ["has_bill_shape::curved_(up_or_down)", "has_size::small"]
    assert dataset.class_ids == ["1", "2"]
    assert positives(cub.read(str(cub_root), "test")) == {"001.Black_footed/B_0009_34": [0, 1]}


def test_cub_errors(cub_root):
    labels = cub_root / "attributes/image_attribute_labels.txt"
    text = labels.read_text()
    labels.write_text(text + "3 9 1 3 6.0\n")
    with pytest.raises(UserError, match=r"image_attribute_labels\.txt:7: .*1\.\.2"):
        cub.read(str(cub_root))
    labels.write_text(text.replace("3 2 1 3 6.0\n", ""))
    with pytest.raises(UserError, match="no line for image id 3 and attribute id 2"):
        cub.read(str(cub_root))
    (cub_root / "../attributes.txt").unlink()
    with pytest.raises(UserError, match=r"attributes\.txt: not found"):
        cub.read(str(cub_root))
