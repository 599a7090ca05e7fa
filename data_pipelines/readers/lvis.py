"""LVIS: federated labels. Annotated categories are positive, `neg_category_ids` verified negatives, the rest unknown.

`not_exhaustive_category_ids` (not every instance was boxed) say nothing about presence: such a category is positive if
it has an annotation, else unknown. Class order is the file's "categories"; images keep the file's order.
"""

from __future__ import annotations

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, read_json, refuse_conflict, without_missing
from lacuna.data_pipelines.readers.coco import category_index


def configure(group) -> None:
    group.add_argument("--annotations", required=True, metavar="FILE", help="e.g. lvis_v1_train.json")
    group.add_argument("--images", required=True, metavar="DIR",
                       help="COCO folder or URL; v1 images are looked up in its train2017 and val2017")
    group.add_argument("--split", default="train", help="name to record (default: train)")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def read(annotations: str, images: str, split: str = "train", skip_missing: bool = False) -> Dataset:
    body = read_json(annotations, ("images", "annotations", "categories"))
    index = category_index(body, annotations)
    positives: dict[int, set[int]] = {image["id"]: set() for image in body["images"]}
    for entry in body["annotations"]:
        if entry["image_id"] not in positives:
            raise UserError(f"{annotations}: an annotation names image id {entry['image_id']}, which the file does not "
                            "list. Download it again.")
        positives[entry["image_id"]].add(_class(index, entry["category_id"], annotations))
    samples, negatives = [], []
    for image in body["images"]:
        if "neg_category_ids" not in image:
            raise UserError(f"{annotations}: image id {image['id']} has no neg_category_ids; is it an LVIS file?")
        name = _file_name(image, annotations)
        samples.append(file_sample(storage.join(images, name), name))
        negatives.append([_class(index, category, annotations) for category in image["neg_category_ids"]])
        refuse_conflict(positives[image["id"]], negatives[-1], f"{annotations}: image id {image['id']}")
    labels = SparseLabels.from_lists([list(positives[image["id"]]) for image in body["images"]], negatives, UNKNOWN)
    dataset = Dataset([c["name"] for c in body["categories"]], samples, labels, split,
                      [str(c["id"]) for c in body["categories"]],
                      source={"reader": "lvis", "annotations": annotations, "images": images})
    return without_missing(dataset, skip_missing)


def _class(index: dict[int, int], category: int, where: str) -> int:
    if category not in index:
        raise UserError(f"{where}: category id {category} is not among its \"categories\". Download it again.")
    return index[category]


def _file_name(image: dict, where: str) -> str:
    """v1 has only a URL …/train2017/000000391895.jpg (its splits mix COCO's folders); v0.5 has a file name."""
    if "file_name" in image:
        return image["file_name"]
    if "coco_url" not in image:
        raise UserError(f"{where}: image id {image['id']} has neither coco_url nor file_name; is it an LVIS file?")
    return "/".join(image["coco_url"].split("/")[-2:])
