"""LVIS v0.5 and v1: annotated categories are positive, `neg_category_ids` verified negatives, the rest unknown.

`not_exhaustive_category_ids` (not every instance was boxed) say nothing about presence: such a category is positive if
it has an annotation, else unknown. Class order is the file's "categories"; images keep the file's order.

LVIS uses COCO's pictures, which have other names and folders in COCO's 2014 and 2017 releases. `--images` may be the
folder that holds train2017 and val2017, the one that holds train2014 and val2014, or one that holds the pictures
themselves; each picture is taken from the first of these places that has it. Its key does not depend on the place.
"""

from __future__ import annotations

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.base import (
    Dataset,
    Sample,
    first_existing,
    image_extension,
    refuse_conflict,
    sample_key,
    without_missing,
)
from lacuna.data_pipelines.readers.coco import KEYS, Annotated
from lacuna.data_pipelines.readers.json_entries import id_of, read_entries, text_of

_HINT = "Is it an LVIS file?"


def configure(group) -> None:
    group.add_argument("--annotations", required=True, metavar="FILE", help="e.g. lvis_v1_train.json")
    group.add_argument("--images", required=True, metavar="DIR",
                       help="COCO folder or URL: of train2017 and val2017, train2014 and val2014, or the pictures")
    group.add_argument("--split", default="train", help="name to record (default: train)")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def read(annotations: str, images: str, split: str = "train", skip_missing: bool = False) -> Dataset:
    found = Annotated(annotations)
    places: list[list[str]] = []  # where a picture may lie below --images, one list per image
    negatives: list[list[int | str]] = []
    for key, where, entry in read_entries(annotations, KEYS):
        if key == "annotations":
            found.add_label(id_of(entry, "image_id", where, _HINT), id_of(entry, "category_id", where, _HINT))
        elif key == "images":
            places.append(_places(entry, where))
            negatives.append(_negatives(entry, where))
            found.add(key, where, {"id": id_of(entry, "id", where), "file_name": places[-1][0]})
        else:
            found.add(key, where, entry)
    found.finish()
    positives = [found.positives(image) for image in found.files]
    refused = [[_class(found, category) for category in listed] for listed in negatives]
    for image, pos, neg in zip(found.files, positives, refused, strict=True):
        refuse_conflict(pos, neg, f"{annotations}: image id {image}")
    urls = first_existing([[storage.join(images, place) for place in some] for some in places])
    samples = [Sample(sample_key(some[0]), url, image_extension(some[0]))
               for some, url in zip(places, urls, strict=True)]
    labels = SparseLabels.from_lists(positives, refused, UNKNOWN)
    dataset = Dataset(list(found.classes.values()), samples, labels, split, [str(c) for c in found.classes],
                      source={"reader": "lvis", "annotations": annotations, "images": images})
    return without_missing(dataset, skip_missing, "--images (the folder of train2017 and val2017, of train2014 and "
                           "val2014, or of the pictures themselves)")


def _class(found: Annotated, category: int | str) -> int:
    if category not in found.index:
        raise UserError(f"{found.path}: category id {category} is not among its \"categories\". Download it again.")
    return found.index[category]


def _negatives(image: dict, where: str) -> list[int | str]:
    listed = image.get("neg_category_ids")
    if not isinstance(listed, list):
        raise UserError(f"{where} has no list neg_category_ids; its keys are {sorted(image)}. {_HINT}")
    return [id_of({"neg_category_ids": category}, "neg_category_ids", where) for category in listed]


def _places(image: dict, where: str) -> list[str]:
    """v0.5 has a 2014 name, COCO_val2014_000000391895.jpg, v1 only a URL, …/train2017/000000391895.jpg (its splits mix
    COCO's folders). The first place also gives the key.
    """
    if "file_name" not in image and "coco_url" not in image:
        raise UserError(f"{where} has neither coco_url nor file_name; its keys are {sorted(image)}. {_HINT}")
    places = [text_of(image, "file_name", where)] if "file_name" in image else []
    if "coco_url" in image:
        tail = text_of(image, "coco_url", where).split("/")[-2:]
        places += ["/".join(tail), tail[-1]]
    number = places[-1].rpartition("/")[2].rpartition("_")[2]  # 000000391895.jpg
    for folder in ("train2014", "val2014"):  # the 2017 folder does not tell which of the two it was
        if "file_name" not in image or f"_{folder}_" in places[0]:
            places += [f"{folder}/COCO_{folder}_{number}", f"COCO_{folder}_{number}"]
    if "coco_url" not in image:
        places += [f"{folder}/{number}" for folder in ("train2017", "val2017")] + [number]
    return list(dict.fromkeys(places))
