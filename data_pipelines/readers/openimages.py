"""OpenImages V6 image-level labels: CSVs of `ImageID,Source,LabelName,Confidence`.

Human-verified rows only, unless asked: Confidence 1 is a positive, 0 a verified negative; everything else is unknown.
Image ids are 16 hex digits, so an image is one uint64 and a label row 14 bytes: the CSVs are streamed, and only these
columns are held. Images come in the order of their ids. An (image, class) pair that humans answered both ways stays
unknown; a machine's answer never counts where a human gave one.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.encoding import with_rotation
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.base import Dataset, Sample, exist, read_lines, require_folder

_COLUMNS = ("ImageID", "Source", "LabelName", "Confidence")
_IMAGE_NAME = re.compile(r"[0-9a-f]{16}\.jpg")
_BLOCK_BYTES = 32 << 20
_NOWHERE = 65_535  # in a column of folder numbers
_LISTED_SKIPS = 1_000_000  # a list of more is of no use to anyone


def configure(group) -> None:
    group.add_argument("--labels", required=True, nargs="+", metavar="CSV", help="…-human-imagelabels.csv …")
    group.add_argument("--classes", required=True, metavar="CSV", help="class descriptions: MID,name (header or not)")
    group.add_argument("--class-list", metavar="FILE", help="MIDs to keep, one a line (trainable or boxable classes)")
    group.add_argument("--images", required=True, nargs="+", metavar="DIR",
                       help="folders or URLs that hold <ImageID>.jpg, e.g. train_0 train_1 …")
    group.add_argument("--images-csv", metavar="CSV", help="image list whose Rotation column turns images")
    group.add_argument("--split", default="train", help="name to record (default: train)")
    group.add_argument("--machine-confidence", type=float, metavar="P",
                       help="also take machine rows with at least this confidence as positives (default: none)")


def read(labels: list[str], classes: str, images: list[str], class_list: str | None = None,
         images_csv: str | None = None, split: str = "train", machine_confidence: float | None = None) -> Dataset:
    names, mids = _read_classes(classes, class_list)
    found = _collect(labels, mids, machine_confidence)
    image_ids, sparse, conflicts = _group(found, len(mids))
    place = np.full(len(image_ids), _NOWHERE, np.uint16)
    for number, folder in enumerate(images):
        place[_present(image_ids, folder)] = number
    absent = image_ids[place == _NOWHERE]
    kept = np.flatnonzero(place != _NOWHERE)
    samples = ImageList(image_ids[kept], place[kept], [folder.rstrip("/") for folder in images],
                        _rotations(images_csv) if images_csv else {})
    source = {"reader": "openimages", "labels": list(labels), "images": list(images), "rows_read": found.rows,
              "rows_of_other_classes": found.other_classes, "rows_of_machines_left_out": found.machine,
              "contradictions_left_unknown": conflicts, "images_missing": len(absent)}
    skipped = [f"{_hex(image)}.jpg\tno such file" for image in absent[:_LISTED_SKIPS]]
    return Dataset(names, samples, sparse.take(kept), split, mids, source=source, skipped=skipped)


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
        name = _hex(self.ids[row])
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


@dataclass
class Found:
    """Label rows as columns, and counts of what was left out."""

    images: np.ndarray  # uint64
    classes: np.ndarray  # int32
    positive: np.ndarray  # bool
    human: np.ndarray  # bool
    rows: int
    other_classes: int
    machine: int


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


def _collect(paths: list[str], mids: list[str], machine_confidence: float | None) -> Found:
    index = {mid: number for number, mid in enumerate(mids)}
    parts: list[tuple[np.ndarray, ...]] = []
    rows = other = machine_rows = 0
    for path in paths:
        for batch in _batches(path):
            human = ~_per_value(batch["Source"], lambda text: text.startswith("machine"), bool)
            classes = _per_value(batch["LabelName"], lambda text: index.get(text, -1), np.int32)
            confidence = _confidence(batch["Confidence"], path)
            odd = human & (confidence != 0) & (confidence != 1)
            if odd.any():
                first = int(np.argmax(odd))
                raise UserError(f"{path}: image {batch['ImageID'][first]} has a human label with confidence "
                                f"{confidence[first]}; legal: 0 and 1.")
            sure = (confidence >= machine_confidence) if machine_confidence is not None else np.zeros(len(human), bool)
            keep = (classes >= 0) & (human | sure)
            rows += len(human)
            other += int((classes < 0).sum())
            machine_rows += int((~human & ~sure).sum())
            images = _parse_ids(batch["ImageID"], keep, path)
            parts.append((images, classes[keep], confidence[keep] > 0, human[keep]))
    if not rows:
        raise UserError(f"{', '.join(paths)}: no label rows. Download the CSV again.")
    images, classes, positive, by_human = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Found(images, classes, positive, by_human, rows, other, machine_rows)


def _batches(path: str) -> Iterator[pa.RecordBatch]:
    types = {name: pa.string() for name in _COLUMNS}
    try:
        with storage.open_stream(path) as stream:
            reader = arrow_csv.open_csv(
                stream, read_options=arrow_csv.ReadOptions(block_size=_BLOCK_BYTES),
                convert_options=arrow_csv.ConvertOptions(column_types=types, include_columns=list(_COLUMNS)))
            yield from reader
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Check --labels.") from None
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise UserError(f"{path}: not a CSV with the columns {','.join(_COLUMNS)} ({error}).") from None


def _per_value(column: pa.Array, answer, dtype) -> np.ndarray:
    """answer(text) for every row, asked once per distinct text."""
    encoded = column.dictionary_encode()
    answers = np.array([answer(text) for text in encoded.dictionary.to_pylist()], dtype=dtype)
    return answers[encoded.indices.to_numpy(zero_copy_only=False)]


def _confidence(column: pa.Array, path: str) -> np.ndarray:
    try:
        return pc.cast(column, pa.float32()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: a Confidence is not a number ({error}).") from None


_HEX = np.full(256, 255, np.uint8)
_HEX[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def _parse_ids(column: pa.Array, keep: np.ndarray, path: str) -> np.ndarray:
    kept = column.filter(pa.array(keep))
    if not len(kept):
        return np.zeros(0, np.uint64)
    lengths = pc.binary_length(kept).to_numpy(zero_copy_only=False)
    bad = lengths != 16
    if not bad.any():
        digits = _HEX[np.frombuffer("".join(kept.to_pylist()).encode(), np.uint8)].reshape(-1, 16)
        bad = (digits == 255).any(axis=1)
    if bad.any():
        raise UserError(f"{path}: ImageID {kept[int(np.argmax(bad))].as_py()!r} is not 16 lower-case hex digits.")
    octets = (digits[:, 0::2] << 4) | digits[:, 1::2]
    return octets.copy().view(">u8").ravel().astype(np.uint64)


def _group(found: Found, classes: int) -> tuple[np.ndarray, SparseLabels, int]:
    """(image ids ascending, labels, number of contradictory pairs)."""
    image_ids, image_row = np.unique(found.images, return_inverse=True)
    # One number for (image, class, answer), sorted once: repeats and contradictions become neighbours.
    answers = (image_row.astype(np.int64) * classes + found.classes) * 2 + found.positive
    if not found.human.all():
        asked = np.isin(answers >> 1, answers[found.human] >> 1)  # pairs that a human answered
        answers = answers[found.human | ~asked]
    answers = np.sort(answers)
    answers = answers[np.diff(answers, prepend=-1) != 0]
    entry, is_positive = answers >> 1, (answers & 1).astype(bool)
    twice = np.diff(entry, prepend=-1) == 0
    sure = ~(twice | np.append(twice[1:], False))
    positive, negative = entry[sure & is_positive], entry[sure & ~is_positive]
    starts = np.arange(len(image_ids) + 1, dtype=np.int64) * classes
    labels = SparseLabels(np.searchsorted(positive, starts), (positive % classes).astype(np.int32),
                          np.searchsorted(negative, starts), (negative % classes).astype(np.int32), UNKNOWN)
    return image_ids, labels, int(twice.sum())


def _present(image_ids: np.ndarray, images: str) -> np.ndarray:
    """bool [N]: the image file exists."""
    if images.startswith(("http://", "https://")):
        return np.array(exist([f"{images.rstrip('/')}/{_hex(image)}.jpg" for image in image_ids]), dtype=bool)
    names: Iterable[str]
    if storage.is_local(images):
        # Entry by entry: the sorted list of nine million names would take a gigabyte.
        names = (entry.name for entry in os.scandir(require_folder(images, "--images")))
    else:
        names = storage.list_names(images)
    there = np.fromiter((int(name[:16], 16) for name in names if _IMAGE_NAME.fullmatch(name)), np.uint64)
    return np.isin(image_ids, there)


def _rotations(path: str) -> dict[int, int]:
    """Image id → degrees counter-clockwise, for turned images only."""
    with storage.open_stream(path) as stream:
        try:
            options = arrow_csv.ConvertOptions(column_types={"ImageID": pa.string(), "Rotation": pa.string()},
                                               include_columns=["ImageID", "Rotation"])
            reader = arrow_csv.open_csv(stream, convert_options=options,
                                        parse_options=arrow_csv.ParseOptions(newlines_in_values=True))
            turned = [(row["ImageID"], row["Rotation"]) for batch in reader
                      for row in batch.filter(_per_value(batch["Rotation"], _is_turned, bool)).to_pylist()]
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise UserError(f"{path}: not an image list with the columns ImageID and Rotation ({error}).") from None
    degrees = {int(name, 16): int(float(rotation)) for name, rotation in turned}
    odd = sorted(set(degrees.values()) - {90, 180, 270})
    if odd:
        raise UserError(f"{path}: Rotation {odd[0]}; legal: 0, 90, 180, 270 or empty.")
    return degrees


def _is_turned(text: str | None) -> bool:
    return text not in (None, "", "nan", "0", "0.0")


def _hex(image: int) -> str:
    return f"{int(image):016x}"
