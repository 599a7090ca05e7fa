"""Labels of ImageNet's validation images in the forms in which they are published.

  - one WNID per line, or one devkit id 1..1000 per line (meta.mat maps them to WNIDs), line i being
    ILSVRC2012_val_{i:08d};
  - `file label` per line, by space or comma, the label a WNID or an index 0..999 in sorted-WNID order;
  - the Kaggle CSV, whose boxes after the label are ignored.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from lacuna.basics.errors import UserError
from lacuna.basics.whole_number import whole_number
from lacuna.data_pipelines.readers.base import read_lines

WNID = re.compile(r"n\d{8}")
Synsets = dict[str, str]  # WNID → name


@dataclass(frozen=True)
class GroundTruth:
    path: str
    labels: dict[str, tuple[str, int]]  # file stem → label as written, number of the entry
    by_place: bool  # the file names no image: entry i is validation image i

    @property
    def wnids(self) -> set[str]:
        """WNIDs that occur as labels."""
        return {label for label, _ in self.labels.values() if WNID.fullmatch(label)}

    @property
    def only_numbers(self) -> bool:
        return self.by_place and not self.wnids

    def require(self, stems: list[str], whose: str) -> None:
        """Refuse a file that does not have exactly these images."""
        absent = next((stem for stem in stems if stem not in self.labels), None)
        if absent is not None or len(self.labels) != len(stems):
            raise UserError(f"{self.path}: labels of {len(self.labels):,} images, {whose} has {len(stems):,}"
                            f"{f' ({absent} has none)' if absent else ''}. Give the ground truth of {whose}.")

    def wnid(self, stem: str, by_devkit_id: dict[int, str], wnids: list[str]) -> str:
        """The WNID of one image; `wnids` is the sorted class list."""
        label, number = self.labels[stem]
        if WNID.fullmatch(label):
            return label
        value = int(label)
        if self.by_place:  # the devkit's own file: 1-based ids in the devkit's order
            if not by_devkit_id:
                raise UserError(f"{self.path}: devkit ids (1..1000) are in the devkit's order, not in WNID order. Give "
                                "the devkit's meta.mat with --meta.")
            if value not in by_devkit_id:
                raise UserError(f"{self.path}:{number}: id {value}, legal: {min(by_devkit_id)}..{max(by_devkit_id)}.")
            return by_devkit_id[value]
        if not wnids:
            raise UserError(f"{self.path}: labels are class indices; give the class list with --synsets (or --meta).")
        if not 0 <= value < len(wnids):
            raise UserError(f"{self.path}:{number}: class index {value}, legal: 0..{len(wnids) - 1}.")
        return wnids[value]


def validation_stem(number: int) -> str:
    """File name without ending of the validation image of a number ≥ 1."""
    return f"ILSVRC2012_val_{number:08d}"


def read_ground_truth(path: str) -> GroundTruth:
    lines = enumerate(read_lines(path), 1)
    entries = [e for number, line in lines if (e := _split_line(line, f"{path}:{number}")) is not None]
    labels = {name or validation_stem(number): (label, number) for number, (name, label) in enumerate(entries, 1)}
    return GroundTruth(path, labels, all(name is None for name, _ in entries))


def _split_line(line: str, where: str) -> tuple[str | None, str] | None:
    """(file stem or None, label); None for the header of the Kaggle CSV."""
    fields = line.replace(",", " ").split()
    if fields[:1] == ["ImageId"]:
        return None
    name, label = (None, "".join(fields)) if len(fields) < 2 else (os.path.basename(fields[0]), fields[1])
    if whole_number(label) is None and not WNID.fullmatch(label):
        raise UserError(f"{where}: {line!r}; expected a WNID or a number, or a file name and one of them.")
    return (name.rsplit(".", 1)[0] if name else None), label


def read_synsets(path: str) -> Synsets:
    """WNID → name from `WNID name` lines."""
    names = {}
    for number, line in enumerate(read_lines(path), 1):
        wnid, _, name = line.strip().partition(" ")
        if not WNID.fullmatch(wnid):
            raise UserError(f"{path}:{number}: {line!r} does not start with a WNID such as n01440764.")
        names[wnid] = name.strip() or wnid
    return names


def read_meta(path: str) -> tuple[dict[int, str], Synsets]:
    """(devkit id → WNID, WNID → name) from the devkit's meta.mat."""
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


def imagenet_wnids() -> list[str]:
    """The 1000 WNIDs of ImageNet-1K, sorted, for labels that come as class indices alone."""
    from timm.data import ImageNetInfo  # imports torch, and rarely needed

    return sorted(ImageNetInfo("imagenet-1k").label_names())
