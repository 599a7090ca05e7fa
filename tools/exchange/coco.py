"""COCO JSON: positives as annotations, negatives as LVIS's neg_category_ids, suggestions as COCO's results."""

from __future__ import annotations

import posixpath

from lacuna.basics.errors import UserError
from lacuna.tools.exchange.bundle import Bundle, Marks, read_json, write_json

FILE, RESULTS = "annotations.json", "results.json"


def write(bundle: Bundle, out: str) -> None:
    number = {name: i + 1 for i, name in enumerate(bundle.classes)}
    images, results = list[dict](), list[dict]()
    annotations: list[dict] = []
    for image, (key, marks) in enumerate(bundle.samples.items(), 1):
        images.append({"id": image, "file_name": bundle.files.get(key, key),
                       "neg_category_ids": [number[name] for name in marks.negatives],
                       "not_exhaustive_category_ids": []})
        annotations += [{"id": len(annotations) + 1 + i, "image_id": image, "category_id": number[name], "iscrowd": 0,
                         "bbox": [], "segmentation": [], "area": 0} for i, name in enumerate(marks.positives)]
        results += [{"image_id": image, "category_id": number[name], "bbox": [], "score": score}
                    for name, score in marks.suggested.items()]
    write_json(out, FILE, {"info": {"description": "image-level labels"}, "licenses": [], "images": images,
                           "annotations": annotations,
                           "categories": [{"id": i, "name": name} for name, i in number.items()]})
    write_json(out, RESULTS, results)


def read(folder: str) -> Bundle:
    body = read_json(folder, FILE)
    try:
        names = {int(c["id"]): str(c["name"]) for c in body["categories"]}
        keys = {int(i["id"]): posixpath.splitext(str(i["file_name"]))[0] for i in body["images"]}
        samples = {keys[int(i["id"])]: Marks([], [names[int(c)] for c in i.get("neg_category_ids", ())])
                   for i in body["images"]}
        for one in body["annotations"]:
            marks, name = samples[keys[int(one["image_id"])]], names[int(one["category_id"])]
            if name not in marks.positives:  # a class has as many annotations as objects
                marks.positives.append(name)
        for one in _results(folder):
            marks, name = samples[keys[int(one["image_id"])]], names[int(one["category_id"])]
            marks.suggested[name] = max(float(one["score"]), marks.suggested.get(name, float("-inf")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}: not COCO's format ({type(error).__name__}: {error}).") from None
    return Bundle([names[i] for i in sorted(names)], samples)


def _results(folder: str) -> list:
    try:
        return read_json(folder, RESULTS)
    except UserError as error:
        if "no such file" in str(error):
            return []
        raise
