"""ImageNet-1K. Class order is the sorted WNIDs, as in torchvision and ReaL; it is *not* the devkit's order.

train: WNID folders. val: WNID folders as well, or one flat folder with `--ground-truth`, which may be
  - one WNID a line, or one devkit id 1..1000 a line (needs `--meta`: meta.mat, which maps them to WNIDs), line i being
    ILSVRC2012_val_{i:08d}; or
  - `file label` a line, by space or comma, the label a WNID or an index 0..999 in sorted-WNID order.
`--real real.json` replaces the labels of val by the ReaL sets (images with an empty set are left out).
"""

from __future__ import annotations

import json
import os
import re

from lacuna.basics.errors import UserError
from lacuna.basics.whole_number import whole_number
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, file_sample, read_lines, read_text, require_folder, walk_images

_WNID = re.compile(r"n\d{8}")
_VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
Synsets = dict[str, str]  # WNID → name


def configure(group) -> None:
    group.add_argument("--images", required=True, metavar="DIR", help="the train or val folder")
    group.add_argument("--split", default="train", choices=["train", "val"], help="default: train")
    group.add_argument("--ground-truth", metavar="FILE", help="labels of a flat val folder")
    group.add_argument("--meta", metavar="FILE", help="the devkit's meta.mat")
    group.add_argument("--synsets", metavar="FILE", help="`WNID name` a line: all classes and their names")
    group.add_argument("--real", metavar="FILE", help="real.json: the ReaL label sets of val")


def read(images: str, split: str = "train", ground_truth: str | None = None, meta: str | None = None,
         synsets: str | None = None, real: str | None = None) -> Dataset:
    root = require_folder(images, "--images")
    by_devkit_id, names = _read_meta(meta) if meta else ({}, {})
    names = {**names, **(_read_synsets(synsets) if synsets else {})}
    folders = sorted(e.name for e in os.scandir(root) if e.is_dir() and _WNID.fullmatch(e.name))
    if folders:
        wnids = sorted(set(names) | set(folders))
        files, labels = _from_folders(root, folders)
    elif ground_truth:
        files = sorted(e.name for e in os.scandir(root) if e.is_file() and e.name.lower().endswith((".jpeg", ".jpg")))
        wnids, labels = _from_ground_truth(ground_truth, files, by_devkit_id, sorted(names))
    else:
        raise UserError(f"--images {images}: has no WNID folder such as n01440764. Give the labels of a flat folder "
                        "with --ground-truth.")
    index = {wnid: number for number, wnid in enumerate(wnids)}
    positives, unlisted, skipped = [[index[wnid]] for wnid in labels], UNKNOWN, list[str]()
    if real:
        files, positives, skipped = _real_labels(real, files, len(wnids))
        unlisted = NEGATIVE
    samples = [file_sample(f"{root}/{name}", name) for name in files]
    return Dataset([names.get(w, w) for w in wnids], samples,
                   SparseLabels.from_lists(positives, [[]] * len(samples), unlisted), split, wnids,
                   source={"reader": "imagenet", "images": images, "real": real}, skipped=skipped)


def _from_folders(root: str, folders: list[str]) -> tuple[list[str], list[str]]:
    files, labels = [], []
    for wnid in folders:
        found, _ = walk_images(os.path.join(root, wnid))
        files += [f"{wnid}/{name}" for name in found]
        labels += [wnid] * len(found)
    return files, labels


def _from_ground_truth(path: str, files: list[str], by_devkit_id: dict[int, str],
                       known: list[str]) -> tuple[list[str], list[str]]:
    """(sorted WNIDs, WNID of every file)."""
    lines = enumerate(read_lines(path), 1)
    entries = [e for number, line in lines if (e := _split_line(line, f"{path}:{number}")) is not None]
    numbered = {file.rsplit(".", 1)[0]: file for file in files}
    by_name: dict[str, tuple[str, int]] = {}
    for number, (name, label) in enumerate(entries, 1):
        by_name[name or f"ILSVRC2012_val_{number:08d}"] = (label, number)
    absent = [stem for stem in numbered if stem not in by_name]
    if absent or len(by_name) != len(numbered):
        raise UserError(f"{path}: labels of {len(by_name):,} images, the folder has {len(numbered):,}"
                        f"{f' ({absent[0]} has none)' if absent else ''}. Give the ground truth of this folder.")
    used = {label for label, _ in by_name.values() if _WNID.fullmatch(label)}
    wnids = sorted(set(known) | set(by_devkit_id.values()) | used)
    plain_list = all(name is None for name, _ in entries)
    return wnids, [_wnid(*by_name[stem], path, by_devkit_id, wnids, plain_list) for stem in numbered]


def _wnid(label: str, number: int, path: str, by_devkit_id: dict[int, str], wnids: list[str], plain: bool) -> str:
    if _WNID.fullmatch(label):
        return label
    value = int(label)
    if plain:  # the devkit's own file: 1-based ids in the devkit's order
        if not by_devkit_id:
            raise UserError(f"{path}: devkit ids (1..1000) are in the devkit's order, not in WNID order. Give the "
                            "devkit's meta.mat with --meta.")
        if value not in by_devkit_id:
            raise UserError(f"{path}:{number}: id {value}, legal: {min(by_devkit_id)}..{max(by_devkit_id)}.")
        return by_devkit_id[value]
    if not wnids:
        raise UserError(f"{path}: labels are class indices; give the class list with --synsets (or --meta).")
    if not 0 <= value < len(wnids):
        raise UserError(f"{path}:{number}: class index {value}, legal: 0..{len(wnids) - 1}.")
    return wnids[value]


def _split_line(line: str, where: str) -> tuple[str | None, str] | None:
    """(file stem or None, label); None for the header of the Kaggle CSV. Boxes after the label are ignored."""
    fields = line.replace(",", " ").split()
    if fields[:1] == ["ImageId"]:
        return None
    name, label = (None, fields[0]) if len(fields) == 1 else (os.path.basename(fields[0]), "".join(fields[1:2]))
    if whole_number(label) is None and not _WNID.fullmatch(label):
        raise UserError(f"{where}: {line!r}; expected a WNID or a number, or a file name and one of them.")
    return (name.rsplit(".", 1)[0] if name else None), label


def _read_synsets(path: str) -> Synsets:
    names = {}
    for number, line in enumerate(read_lines(path), 1):
        wnid, _, name = line.strip().partition(" ")
        if not _WNID.fullmatch(wnid):
            raise UserError(f"{path}:{number}: {line!r} does not start with a WNID such as n01440764.")
        names[wnid] = name.strip() or wnid
    return names


def _read_meta(path: str) -> tuple[dict[int, str], Synsets]:
    from scipy.io import loadmat  # slow to import, and rarely needed

    try:
        synsets = loadmat(path, squeeze_me=True, struct_as_record=True)["synsets"]
        # Inner nodes of the WordNet tree follow the 1000 leaves; only leaves are classes.
        leaves = [s for s in synsets if int(s["num_children"]) == 0]
        by_id = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in leaves}
        return by_id, {str(s["WNID"]): str(s["words"]) for s in leaves}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. It is in ILSVRC2012_devkit_t12/data.") from None
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError) as error:
        raise UserError(f"{path}: not the devkit's meta.mat ({type(error).__name__}: {error}).") from None


def _real_labels(path: str, files: list[str], classes: int) -> tuple[list[str], list[list[int]], list[str]]:
    """(files kept, their label sets, files left out): entry i of real.json belongs to ILSVRC2012_val_{i+1:08d}."""
    try:
        sets = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}). Download it again.") from None
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
