"""OpenImages V6 image-level labels: CSVs of `ImageID,Source,LabelName,Confidence`.

Human-verified rows only, unless asked: Confidence 1 is a positive, 0 a verified negative; everything else is unknown.
Images come in the order of their ids. An (image, class) pair that humans answered both ways stays unknown; a machine's
answer never counts where a human gave one. Images that no folder holds are left out and counted.

`--listing DIR` keeps what was found in remote folders, in 256 parts by the first two digits of the image id: a `make`
that was stopped while it listed nine million images goes on where it was. It is never updated: remove it when images
were added.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.encoding import with_rotation
from lacuna.data_pipelines.readers.base import Dataset, Sample, read_lines
from lacuna.data_pipelines.readers.openimages.folders import NOWHERE, ImageFolders, hex_name
from lacuna.data_pipelines.readers.openimages.label_rows import LabelRows, per_value

_LISTED_SKIPS = 1_000_000  # a list of more is of no use to anyone


def configure(group) -> None:
    group.add_argument("--labels", required=True, nargs="+", metavar="CSV", help="…-human-imagelabels.csv …")
    group.add_argument("--classes", required=True, metavar="CSV", help="class descriptions: MID,name (header or not)")
    group.add_argument("--class-list", metavar="FILE", help="MIDs to keep, one per line (trainable or boxable classes)")
    group.add_argument("--images", required=True, nargs="+", metavar="DIR",
                       help="folders or URLs that hold <ImageID>.jpg, e.g. train_0 train_1 …")
    group.add_argument("--images-csv", metavar="CSV", help="image list whose Rotation column turns images")
    group.add_argument("--split", default="train", help="name to record (default: train)")
    group.add_argument("--machine-confidence", type=float, metavar="P",
                       help="also take machine rows with at least this confidence as positives (default: none)")
    group.add_argument("--listing", metavar="DIR", help="keep what remote image folders hold here (default: nowhere)")


def read(labels: list[str], classes: str, images: list[str], class_list: str | None = None,
         images_csv: str | None = None, split: str = "train", machine_confidence: float | None = None,
         listing: str | None = None) -> Dataset:
    names, mids = _read_classes(classes, class_list)
    folders = ImageFolders(images, listing)
    found = LabelRows(len(mids))
    found.add_files(labels, mids, machine_confidence)
    grouped = found.group(folders.place)
    absent = grouped.images[grouped.place == NOWHERE]
    kept = grouped.place != NOWHERE
    samples = ImageList(grouped.images[kept], grouped.place[kept], [folder.rstrip("/") for folder in images],
                        _rotations(images_csv) if images_csv else {})
    source = {"reader": "openimages", "labels": list(labels), "images": list(images), "rows_read": found.count,
              "rows_of_other_classes": found.other_classes, "rows_of_machines_left_out": found.machine,
              "contradictions_left_unknown": grouped.contradictions, "images_missing": len(absent)}
    skipped = [f"{hex_name(image)}.jpg\tno such file" for image in absent[:_LISTED_SKIPS]]
    return Dataset(names, samples, grouped.labels, split, mids, source=source, skipped=skipped)


@dataclass(frozen=True)
class ImageList(Sequence):
    """Samples made when asked for: nine million ids are 72 MB as numbers and gigabytes as objects."""

    ids: np.ndarray  # uint64
    place: np.ndarray  # uint16, which of the folders
    folders: list[str]
    rotations: dict[int, int]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row):
        if isinstance(row, slice):
            return ImageList(self.ids[row], self.place[row], self.folders, self.rotations)
        name = hex_name(self.ids[row])
        url = f"{self.folders[self.place[row]]}/{name}.jpg"
        degrees = self.rotations.get(int(self.ids[row]), 0)
        return Sample(name, RotatedJpeg(url, degrees) if degrees else url, "jpg")


@dataclass(frozen=True)
class RotatedJpeg:
    """A file that its owner turned: the picture is tagged, not encoded again."""

    url: str
    degrees: int

    def read(self) -> bytes:
        return with_rotation(storage.read_bytes(self.url), self.degrees)

    def __str__(self) -> str:
        return self.url


def _read_classes(path: str, class_list: str | None) -> tuple[list[str], list[str]]:
    """(names, MIDs) in the order of the class list, or of the descriptions without one."""
    described: dict[str, str] = {}
    for number, fields in enumerate(csv.reader(read_lines(path)), 1):
        if number == 1 and fields[:1] == ["LabelName"]:
            continue
        if len(fields) != 2 or not fields[0].startswith("/"):
            raise UserError(f"{path}:{number}: {fields}; expected `MID,name` such as `/m/011k07,Tortoise`.")
        if fields[0] in described:
            raise UserError(f"{path}:{number}: {fields[0]} is described twice. Remove one of the two lines.")
        described[fields[0]] = fields[1]
    if not class_list:
        return list(described.values()), list(described)
    mids = [line.split(",")[0].strip() for line in read_lines(class_list)]
    mids = [mid for number, mid in enumerate(mids) if not (number == 0 and mid == "LabelName")]
    if len(set(mids)) != len(mids):
        raise UserError(f"{class_list}: {next(m for m in mids if mids.count(m) > 1)!r} occurs twice. Remove one.")
    unnamed = [mid for mid in mids if not mid.startswith("/")]
    if unnamed or not mids:
        raise UserError(f"{class_list}: {f'{unnamed[0]!r} is no MID' if unnamed else 'empty'}; expected one MID such "
                        "as /m/011k07 a line.")
    return [described.get(mid, mid) for mid in mids], mids


def _rotations(path: str) -> dict[int, int]:
    """Image id → degrees counter-clockwise, for turned images only."""
    with storage.open_stream(path) as stream:
        try:
            options = arrow_csv.ConvertOptions(column_types={"ImageID": pa.string(), "Rotation": pa.string()},
                                               include_columns=["ImageID", "Rotation"])
            reader = arrow_csv.open_csv(stream, convert_options=options,
                                        parse_options=arrow_csv.ParseOptions(newlines_in_values=True))
            turned = [(row["ImageID"], row["Rotation"]) for batch in reader
                      for row in batch.filter(per_value(batch["Rotation"], _is_turned, bool)).to_pylist()]
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise UserError(f"{path}: not an image list with the columns ImageID and Rotation ({error}).") from None
    degrees = {int(name, 16): int(float(rotation)) for name, rotation in turned}
    odd = sorted(set(degrees.values()) - {90, 180, 270})
    if odd:
        raise UserError(f"{path}: Rotation {odd[0]}; legal: 0, 90, 180, 270 or empty.")
    return degrees


def _is_turned(text: str | None) -> bool:
    return text not in (None, "", "nan", "0", "0.0")
