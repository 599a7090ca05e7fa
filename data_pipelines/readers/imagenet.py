"""ImageNet-1K. Class order is the sorted WNIDs, as in torchvision and ReaL; it is *not* the devkit's order.

train: WNID folders. val: WNID folders as well, or one flat folder with `--ground-truth`, which may be
  - one WNID per line, or one devkit id 1..1000 per line (needs `--meta`: meta.mat, which maps them to WNIDs), line i
    being ILSVRC2012_val_{i:08d}; or
  - `file label` per line, by space or comma, the label a WNID or an index 0..999 in sorted-WNID order.
`--real real.json` replaces the labels of val by the ReaL sets (images with an empty set are left out); a flat folder
then needs no ground truth, and without `--synsets` or `--meta` the classes are ImageNet-1K's 1000.
"""

from __future__ import annotations

import os
import re

from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.base import (
    Dataset,
    file_sample,
    read_text,
    require_folder,
    walk_images,
    without_missing,
)
from lacuna.data_pipelines.readers.ground_truth import WNID, imagenet_wnids, read_ground_truth, read_meta, read_synsets

_VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


def configure(group) -> None:
    group.add_argument("--images", required=True, metavar="DIR", help="the train or val folder")
    group.add_argument("--split", default="train", choices=["train", "val"], help="default: train")
    group.add_argument("--ground-truth", metavar="FILE", help="labels of a flat val folder (not needed with --real)")
    group.add_argument("--meta", metavar="FILE", help="the devkit's meta.mat")
    group.add_argument("--synsets", metavar="FILE", help="`WNID name` per line: all classes and their names")
    group.add_argument("--real", metavar="FILE", help="real.json: the ReaL label sets of val")
    group.add_argument("--skip-missing", action="store_true", help="leave out links whose file is gone")


def read(images: str, split: str = "train", ground_truth: str | None = None, meta: str | None = None,
         synsets: str | None = None, real: str | None = None, skip_missing: bool = False) -> Dataset:
    root = require_folder(images, "--images")
    by_devkit_id, names = read_meta(meta) if meta else ({}, {})
    names = {**names, **(read_synsets(synsets) if synsets else {})}
    folders = sorted(e.name for e in os.scandir(root) if e.is_dir() and WNID.fullmatch(e.name))
    if folders:
        wnids = sorted(set(names) | set(folders))
        files, labels = _from_folders(root, folders)
    elif ground_truth:
        files = _flat_files(root)
        wnids, labels = _from_ground_truth(ground_truth, files, by_devkit_id, sorted(names))
    elif real:
        files, labels = _flat_files(root), []
        wnids = sorted(names) or imagenet_wnids()
    else:
        raise UserError(f"--images {images}: has no WNID folder such as n01440764. Give the labels of a flat folder "
                        "with --ground-truth, or with --real.")
    index = {wnid: number for number, wnid in enumerate(wnids)}
    positives, unlisted, skipped = [[index[wnid]] for wnid in labels], UNKNOWN, list[str]()
    if real:
        files, positives, skipped = _real_labels(real, files, len(wnids))
        unlisted = NEGATIVE
    samples = [file_sample(f"{root}/{name}", name) for name in files]
    dataset = Dataset([names.get(w, w) for w in wnids], samples,
                      SparseLabels.from_lists(positives, [[]] * len(samples), unlisted), split, wnids,
                      source={"reader": "imagenet", "images": images, "real": real}, skipped=skipped)
    return without_missing(dataset, skip_missing)


def _from_folders(root: str, folders: list[str]) -> tuple[list[str], list[str]]:
    files, labels = [], []
    for wnid in folders:
        found, _ = walk_images(os.path.join(root, wnid))
        files += [f"{wnid}/{name}" for name in found]
        labels += [wnid] * len(found)
    return files, labels


def _flat_files(root: str) -> list[str]:
    return sorted(e.name for e in os.scandir(root) if not e.is_dir() and e.name.lower().endswith((".jpeg", ".jpg")))


def _from_ground_truth(path: str, files: list[str], by_devkit_id: dict[int, str],
                       known: list[str]) -> tuple[list[str], list[str]]:
    """(sorted WNIDs, WNID of every file)."""
    truth = read_ground_truth(path)
    stems = [file.rsplit(".", 1)[0] for file in files]
    truth.require(stems, "the folder")
    wnids = sorted({*known, *by_devkit_id.values(), *truth.wnids})
    return wnids, [truth.wnid(stem, by_devkit_id, wnids) for stem in stems]


def read_real(path: str) -> list[list[int]]:
    """ReaL's label sets; entry i belongs to ILSVRC2012_val_{i+1:08d}."""
    try:
        sets = parse_json(read_text(path))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--real {path}: not valid JSON ({error}). Download it again.") from None
    if not isinstance(sets, list) or not all(isinstance(s, list) for s in sets):
        raise UserError(f"--real {path}: expected a list of lists of class ids.")
    for number, ids in enumerate(sets):
        if not all(type(i) is int for i in ids) or len(set(ids)) != len(ids):
            raise UserError(f"--real {path}: entry {number} is {ids!r:.80}; expected different class ids.")
    return sets


def _real_labels(path: str, files: list[str], classes: int) -> tuple[list[str], list[list[int]], list[str]]:
    """(files kept, their label sets, files left out)."""
    sets = read_real(path)
    kept, positives, skipped = [], [], []
    for file in sorted(files, key=os.path.basename):
        match = _VAL_NUMBER.match(os.path.basename(file))
        number = int(match.group(1)) if match else 0
        if not 1 <= number <= len(sets):
            raise UserError(f"{path}: has {len(sets):,} entries, none for {file}. --real is for ILSVRC2012_val_*.")
        labels = sets[number - 1]
        if not labels:
            skipped.append(f"{file}\tempty ReaL set")
            continue
        if not 0 <= min(labels) <= max(labels) < classes:
            raise UserError(f"{path}: entry {number - 1} has class ids {labels}, legal: 0..{classes - 1}. If the "
                            "folder lacks classes, name all of them with --synsets.")
        kept.append(file)
        positives.append(list(labels))
    return kept, positives, skipped
