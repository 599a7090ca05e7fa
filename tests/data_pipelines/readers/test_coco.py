"""Proves the order and labels that the COCO, panoptic and LVIS readers take from their JSON files."""

from __future__ import annotations

import json

import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.readers import coco, lvis
from tests.helpers.annotations import CATEGORIES, box
from tests.helpers.pictures import write_pictures

IMAGES = [{"id": i, "file_name": f"COCO_train2014_{i:012d}.jpg"} for i in (9, 10, 100, 77)]


@pytest.fixture
def make(tmp_path):
    def write(body):
        (tmp_path / "a.json").write_text(json.dumps(body))
        return {"annotations": str(tmp_path / "a.json"), "images": str(tmp_path / "images")}

    write_pictures(tmp_path / "images", [i["file_name"] for i in IMAGES])
    return write


def test_instances_in_string_order_of_ids(make):
    pairs = [(9, 90), (9, 90), (100, 1), (10, 3), (10, 1)]
    paths = make({"images": IMAGES, "annotations": [box(*p) for p in pairs], "categories": CATEGORIES})
    dataset = coco.read_instances(**paths)
    assert [s.key[-3:] for s in dataset.samples] == ["010", "100", "009"], "as strings; 77 has no annotation"
    assert [dataset.labels.positives(r).tolist() for r in range(3)] == [[0, 1], [0], [2]]
    assert dataset.labels.unlisted == NEGATIVE
    assert dataset.classes == ["person", "car", "toothbrush"]
    assert dataset.class_ids == ["1", "3", "90"]
    everything = coco.read_instances(**paths, all_images=True)
    assert [s.key[-3:] for s in everything.samples] == ["010", "100", "077", "009"]
    assert everything.labels.dense(3)[2].tolist() == [NEGATIVE] * 3


def test_panoptic_segments(make):
    annotations = [{"image_id": 10, "file_name": "x.png", "segments_info": [{"category_id": 3}, {"category_id": 90}]},
                   {"image_id": 9, "file_name": "y.png", "segments_info": []}]
    paths = make({"images": IMAGES, "annotations": annotations, "categories": CATEGORIES})
    dataset = coco.read_panoptic(**paths)
    assert [dataset.labels.positives(r).tolist() for r in range(len(dataset.samples))] == [[1, 2]]
    with pytest.raises(UserError, match=r"annotations\[0\] has no 'category_id'"):
        coco.read_instances(**paths)


def test_coco_errors(make):
    with pytest.raises(UserError, match="no 'categories' at the top level"):
        coco.read_instances(**make({"images": [], "annotations": []}))
    with pytest.raises(UserError, match="category id 7"):
        coco.read_instances(**make({"images": IMAGES, "annotations": [box(9, 7)], "categories": CATEGORIES}))
    with pytest.raises(UserError, match="image id 8"):
        coco.read_instances(**make({"images": IMAGES, "annotations": [box(8, 1)], "categories": CATEGORIES}))
    extra = [*IMAGES, {"id": 5, "file_name": "gone.jpg"}]
    paths = make({"images": extra, "annotations": [box(5, 1), box(9, 1)], "categories": CATEGORIES})
    with pytest.raises(UserError, match=r"1 of 2 image files do not exist, first: .*gone\.jpg"):
        coco.read_instances(**paths)
    assert len(coco.read_instances(**paths, skip_missing=True).samples) == 1


def lvis_image(image, negatives, loose=()):
    return {"id": image, "coco_url": f"http://images.example/val2017/{image:012d}.jpg",
            "neg_category_ids": list(negatives), "not_exhaustive_category_ids": list(loose)}


def test_lvis_federated_labels(make, tmp_path):
    write_pictures(tmp_path / "images", [f"val2017/{i:012d}.jpg" for i in (9, 10)])
    paths = make({"images": [lvis_image(10, [90], [3]), lvis_image(9, [], [1])], "annotations": [box(10, 1), box(9, 1)],
                  "categories": CATEGORIES})
    dataset = lvis.read(**paths)
    assert [s.key for s in dataset.samples] == ["val2017/000000000010", "val2017/000000000009"]
    assert dataset.labels.dense(3).tolist() == [[POSITIVE, UNKNOWN, NEGATIVE], [POSITIVE, UNKNOWN, UNKNOWN]]


def test_lvis_errors(make):
    conflict = {"images": [lvis_image(9, [3])], "annotations": [box(9, 3)], "categories": CATEGORIES}
    with pytest.raises(UserError, match="image id 9: class id 1 is listed as positive and as negative"):
        lvis.read(**make(conflict))
    with pytest.raises(UserError, match="neg_category_ids"):
        lvis.read(**make({"images": IMAGES, "annotations": [], "categories": CATEGORIES}))
