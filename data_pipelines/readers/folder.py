"""An image folder: one subfolder per class, images at any depth below it; classes are the subfolders' sorted names."""

from __future__ import annotations

import os

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import UNLISTED_WORDS
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, require_folder, walk_images, without_missing


def configure(group) -> None:
    group.add_argument("--images", required=True, metavar="DIR", help="folder with one subfolder per class")
    group.add_argument("--split", default="train", help="name to record (default: train)")
    group.add_argument("--unlisted", choices=sorted(UNLISTED_WORDS), default="unknown",
                       help="what the other classes of an image are (default: unknown)")
    group.add_argument("--skip-missing", action="store_true", help="leave out links whose file is gone")


def read(images: str, split: str = "train", unlisted: str = "unknown", skip_missing: bool = False) -> Dataset:
    root = require_folder(images, "--images")
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise UserError(f"--images {images}: has no subfolder; expected one per class.")
    samples, positives, skipped = [], [], []
    for index, name in enumerate(classes):
        found, others = walk_images(os.path.join(root, name))
        samples += [file_sample(f"{root}/{name}/{path}", f"{name}/{path}") for path in found]
        positives += [[index]] * len(found)
        skipped += [f"{root}/{name}/{path}\tnot a .jpg, .jpeg, .png or .webp" for path in others]
    labels = SparseLabels.from_lists(positives, [[]] * len(samples), UNLISTED_WORDS[unlisted])
    dataset = Dataset(classes, samples, labels, split, source={"reader": "folder", "images": images}, skipped=skipped)
    return without_missing(dataset, skip_missing)
