"""Damaged annotation files of public datasets end in errors that name them, in time."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.hierarchy import ClassTree
from lacuna.data_pipelines.index import Shard, ShardIndex
from lacuna.data_pipelines.readers import coco, cub, features, imagenet, lvis, nuswide, voc
from lacuna.data_pipelines.readers.ground_truth import read_ground_truth, read_synsets
from lacuna.trainer.priors import read_prior
from tests.helpers.annotations import CATEGORIES, WNIDS, box
from tests.helpers.fuzzing import Targets, damaged_bytes, damaged_json, fuzz_all

ALLOWED = (UserError,)
_IMAGES = [{"id": i, "file_name": f"{i}.jpg", "coco_url": f"http://x/val2017/{i}.jpg", "neg_category_ids": [3],
            "not_exhaustive_category_ids": [90]} for i in (9, 10, 77)]
_BOXES = {"images": _IMAGES, "categories": CATEGORIES, "annotations": [box(9, 90), box(10, 1), box(77, 3)]}
_SEGMENTS = {**_BOXES, "annotations": [{"image_id": 10, "file_name": "x.png", "segments_info": [{"category_id": 3}]}]}
_FILES = {
    "voc/ImageSets/Main/dog_train.txt": "2008_000009 -1\n2008_000002  1\n",
    "voc/ImageSets/Main/cat_train.txt": "2008_000009  1\n2008_000002  0\n",
    "cub/images.txt": "1 a/b.jpg\n2 a/c.jpg\n", "cub/train_test_split.txt": "1 1\n2 1\n",
    "cub/attributes/attributes.txt": "1 has_bill_shape::curved\n2 has_size::small\n",
    "cub/attributes/image_attribute_labels.txt": "1 1 0 3 27.7\n1 2 1 1 2.7\n2 1 1 4 1.0\n2 2 1 4 1.0\n",
    "nus/ImageList/TrainImagelist.txt": "a\\0001_2.jpg\r\nzoo\\0002_1.jpg\r\n",
    "nus/Groundtruth/TrainTestLabels/Labels_sky_Train.txt": "1\n0\n",
    "nus/Groundtruth/TrainTestLabels/Labels_sea_Train.txt": "1\n1\n",
    "nus/ConceptsList/Concepts81.txt": "sea\nsky\n",
    "truth.txt": "ILSVRC2012_val_00000001.JPEG 3\nILSVRC2012_val_00000002.JPEG 1\n",
    "synsets.txt": "".join(f"{wnid} a name, another\n" for wnid in WNIDS),
    "parents.tsv": "# child\tparent\ncat\tpet\npet\tanimal\ndog\tpet\n",
    "prior.csv": "Classes,avg_pred\ncat,0.5\ndog,0.25\n",
}
_PICTURES = ["images/9.jpg", "images/10.jpg", "images/77.jpg", "voc/JPEGImages/2008_000009.jpg",
             "voc/JPEGImages/2008_000002.jpg", "cub/images/a/b.jpg", "cub/images/a/c.jpg", "nus/Flickr/a/0001_2.jpg",
             "nus/Flickr/zoo/0002_1.jpg", "val/ILSVRC2012_val_00000001.JPEG", "val/ILSVRC2012_val_00000002.JPEG"]


def saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def targets(folder: Path) -> Targets:
    for name, text in {**_FILES, **dict.fromkeys(_PICTURES, "")}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    values, labels = saved(np.ones((3, 4), np.float32)), saved(np.array([[0, 1], [1, 0], [-1, 1]], np.int8))
    (folder / "values.npy").write_bytes(values)
    (folder / "labels.npy").write_bytes(labels)
    images = str(folder / "images")

    def of(name: str, read):
        """Of one file: it is damaged, the others are as they should be."""
        path = folder / name
        good = path.read_bytes() if path.exists() else b""

        def attempt(data: bytes) -> None:
            path.write_bytes(data)
            try:
                read()
            finally:
                path.write_bytes(good)
        return attempt

    def listed(name: str, read) -> tuple:
        return damaged_bytes((folder / name).read_bytes()), of(name, read)

    boxes, segments = json.dumps(_BOXES).encode(), json.dumps(_SEGMENTS).encode()
    index = ShardIndex(str(folder), ["cat", "dog", "animal"], [Shard("shard-00000.tar", 3, 4096)])
    a, root = str(folder / "a.json"), str(folder)
    return {
        "coco": (damaged_json(boxes), of("a.json", lambda: coco.read_instances(a, images))),
        "coco bytes": (damaged_bytes(boxes), of("a.json", lambda: coco.read_instances(a, images, all_images=True))),
        "panoptic": (damaged_json(segments), of("a.json", lambda: coco.read_panoptic(a, images))),
        "lvis": (damaged_json(boxes), of("a.json", lambda: lvis.read(a, images))),
        "voc": listed("voc/ImageSets/Main/dog_train.txt", lambda: voc.read(f"{root}/voc")),
        "cub": listed("cub/attributes/image_attribute_labels.txt", lambda: cub.read(f"{root}/cub")),
        "cub images": listed("cub/images.txt", lambda: cub.read(f"{root}/cub")),
        "nus": listed("nus/Groundtruth/TrainTestLabels/Labels_sky_Train.txt",
                      lambda: nuswide.read(f"{root}/nus", f"{root}/nus/Flickr")),
        "nus images": listed("nus/ImageList/TrainImagelist.txt",
                             lambda: nuswide.read(f"{root}/nus", f"{root}/nus/Flickr")),
        "ground truth": listed("truth.txt", lambda: read_ground_truth(f"{root}/truth.txt")),
        "imagenet": listed("truth.txt", lambda: imagenet.read(
            f"{root}/val", "val", ground_truth=f"{root}/truth.txt", synsets=f"{root}/synsets.txt")),
        "synsets": listed("synsets.txt", lambda: read_synsets(f"{root}/synsets.txt")),
        "parents": listed("parents.tsv", lambda: ClassTree.load(f"{root}/parents.tsv", index)),
        "features": listed("values.npy", lambda: features.read(f"{root}/values.npy", f"{root}/labels.npy")),
        "feature labels": listed("labels.npy", lambda: features.read(f"{root}/values.npy", f"{root}/labels.npy")),
        "prior": listed("prior.csv", lambda: read_prior(f"{root}/prior.csv", 2, ["cat", "dog"])),
        "prior json": (damaged_json(b'{"classes": ["cat", "dog"], "prior": [0.5, 0.2]}'),
                       of("p.json", lambda: read_prior(f"{root}/p.json", 2, ["cat", "dog"]))),
    }


def test_damaged_annotations(tmp_path):
    fuzz_all(targets(tmp_path), ALLOWED)
