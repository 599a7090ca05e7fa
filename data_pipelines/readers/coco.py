"""COCO instances and panoptic annotations as full multi-labels.

Class order is the order of the JSON's "categories". Images come in the order of their ids sorted as *strings*, and only
those with an annotation, because the published single-positive labels were drawn in that order (Cole et al., 2021); the
others are counted as skipped, and `--all-images` keeps them.
"""

from __future__ import annotations

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, without_missing
from lacuna.data_pipelines.readers.json_entries import id_of, read_entries, text_of

KEYS = ("images", "annotations", "categories")
_HINT = "Is it an instances (not captions, panoptic, …) file?"
_PANOPTIC_HINT = "Is it a panoptic (not instances, captions, …) file?"


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
    found = Annotated(annotations)
    for key, where, entry in read_entries(annotations, KEYS):
        if key == "annotations":
            found.add_label(id_of(entry, "image_id", where, _HINT), id_of(entry, "category_id", where, _HINT))
        else:
            found.add(key, where, entry)
    return _dataset("coco", found, images, split, all_images, skip_missing)


def read_panoptic(annotations: str, images: str, split: str = "train", all_images: bool = False,
                  skip_missing: bool = False) -> Dataset:
    found = Annotated(annotations)
    for key, where, entry in read_entries(annotations, KEYS):
        if key == "annotations":
            image = id_of(entry, "image_id", where, _PANOPTIC_HINT)
            segments = entry.get("segments_info")
            if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
                raise UserError(f"{where} has no list of objects 'segments_info'; its keys are {sorted(entry)}. "
                                f"{_PANOPTIC_HINT}")
            for segment in segments:
                found.add_label(image, id_of(segment, "category_id", f"{where}.segments_info", _PANOPTIC_HINT))
        else:
            found.add(key, where, entry)
    return _dataset("coco_panoptic", found, images, split, all_images, skip_missing)


class Annotated:
    """What the entries of an annotation file said; classes are known only when the last entry was read."""

    def __init__(self, path: str):
        self.path = path
        self.files: dict[int | str, str] = {}  # image id → file name
        self.labels: dict[int | str, set[int | str]] = {}  # image id → category ids
        self.classes: dict[int | str, str] = {}  # category id → name

    def add(self, key: str, where: str, entry: dict) -> None:
        """An entry of "images" or "categories"."""
        number = id_of(entry, "id", where)
        known, field = (self.files, "file_name") if key == "images" else (self.classes, "name")
        if number in known:
            raise UserError(f"{where}: the id {number!r} occurs twice in \"{key}\". Remove one of the two.")
        known[number] = text_of(entry, field, where)

    def add_label(self, image: int | str, category: int | str) -> None:
        self.labels.setdefault(image, set()).add(category)

    def positives(self, image: int | str) -> list[int]:
        """Class indices of one image, in the order of "categories"."""
        return [self.index[category] for category in self.labels.get(image, ())]

    def finish(self) -> None:
        """Check that annotations name listed images and categories only."""
        self.index = {category: number for number, category in enumerate(self.classes)}
        for image, categories in self.labels.items():
            strange = next((c for c in categories if c not in self.index), None)
            if image not in self.files or strange is not None:
                what = f"image id {image}" if image not in self.files else f"category id {strange}"
                raise UserError(f"{self.path}: an annotation names {what}, which the file does not list. Download it "
                                "again.")


def _dataset(reader: str, found: Annotated, images: str, split: str, all_images: bool, skip_missing: bool) -> Dataset:
    found.finish()
    files = found.files
    order = sorted(files if all_images else found.labels, key=str)
    bare = [] if all_images else [files[image] for image in files if image not in found.labels]
    samples = [file_sample(storage.join(images, files[image]), files[image]) for image in order]
    labels = SparseLabels.from_lists([found.positives(image) for image in order], [[]] * len(order), NEGATIVE)
    dataset = Dataset(list(found.classes.values()), samples, labels, split, [str(c) for c in found.classes],
                      source={"reader": reader, "annotations": found.path, "images": images,
                              "images_without_annotation": len(files) - len(found.labels)},
                      skipped=[f"{name}\tno annotation (kept with --all-images)" for name in bare])
    return without_missing(dataset, skip_missing)
