"""What annotation files of COCO's kind and ImageNet's lists hold in the readers' tests."""

from __future__ import annotations

CATEGORIES = [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}, {"id": 90, "name": "toothbrush"}]
WNIDS = ["n01440764", "n02012849", "n03126707"]
VAL = [f"ILSVRC2012_val_{i:08d}" for i in range(1, 5)]


def box(image, category):
    return {"image_id": image, "category_id": category, "iscrowd": 0, "bbox": [0, 0, 1, 1]}
