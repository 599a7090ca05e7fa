"""COCO instances and panoptic annotations as full multi-labels.

Class order is the order of the JSON's "categories". Images come in the order of their ids sorted as *strings*, and only
those with an annotation, because the published single-positive labels were drawn in that order (Cole et al., 2021).
"""

from __future__ import annotations

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, read_json, without_missing


def configure_instances(group) -> None:
    group.add_argument("--annotations", required=True, metavar="FILE", help="e.g. instances_train2014.json")
    group.add_argument("--images", required=True, metavar="DIR", help="folder or URL of the images, e.g. train2014")
    group.add_argument("--split", default="train", help="name to record (default: train)")
    group.add_argument("--all-images", action="store_true", help="also images without any annotation (all negative)")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def configure_panoptic(group) -> None:
    configure_instances(group)


def read_instances(annotations: str, images: str, split: str = "train", all_images: bool = False,
                   skip_missing: bool = False) -> Dataset:
    body = read_json(annotations, ("images", "annotations", "categories"))
    pairs = [(a["image_id"], a["category_id"]) for a in _fields(body, annotations, "image_id", "category_id")]
    return _dataset("coco", body, pairs, annotations, images, split, all_images, skip_missing)


def read_panoptic(annotations: str, images: str, split: str = "train", all_images: bool = False,
                  skip_missing: bool = False) -> Dataset:
    body = read_json(annotations, ("images", "annotations", "categories"))
    pairs = [(a["image_id"], segment["category_id"]) for a in _fields(body, annotations, "image_id", "segments_info")
             for segment in a["segments_info"]]
    return _dataset("coco_panoptic", body, pairs, annotations, images, split, all_images, skip_missing)


def _fields(body: dict, where: str, *names: str) -> list[dict]:
    for number, entry in enumerate(body["annotations"]):
        absent = [name for name in names if name not in entry]
        if absent:
            raise UserError(f"{where}: annotations[{number}] has no {absent[0]!r}; its keys are {sorted(entry)}. Is it "
                            "an instances (not captions, panoptic, …) file?")
    return body["annotations"]


def category_index(body: dict, where: str) -> dict[int, int]:
    """Category id → class index, in the order of the file."""
    index = {category["id"]: number for number, category in enumerate(body["categories"])}
    if len(index) != len(body["categories"]):
        raise UserError(f"{where}: a category id occurs twice in \"categories\".")
    return index


def _dataset(reader: str, body: dict, pairs: list[tuple[int, int]], where: str, images: str, split: str,
             all_images: bool, skip_missing: bool) -> Dataset:
    index = category_index(body, where)
    files = {image["id"]: image["file_name"] for image in body["images"]}
    found: dict[int, set[int]] = {image: set() for image in files} if all_images else {}
    for image, category in pairs:
        if image not in files or category not in index:
            what = f"image id {image}" if image not in files else f"category id {category}"
            raise UserError(f"{where}: an annotation names {what}, which the file does not list. Download it again.")
        found.setdefault(image, set()).add(index[category])
    order = sorted(found, key=str)
    samples = [file_sample(storage.join(images, files[image]), files[image]) for image in order]
    labels = SparseLabels.from_lists([list(found[image]) for image in order], [[]] * len(order), NEGATIVE)
    dataset = Dataset([c["name"] for c in body["categories"]], samples, labels, split,
                      [str(c["id"]) for c in body["categories"]],
                      source={"reader": reader, "annotations": where, "images": images})
    return without_missing(dataset, skip_missing)
