"""Label rows of OpenImages' CSVs as columns, grouped by image.

Image ids are 16 hex digits, so an image is one uint64 and a row 12 bytes. Rows are held in 256 parts by the first byte
of the id, and grouped part after part: what sorting needs besides the rows themselves is needed for one part only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import UNKNOWN, SparseLabels
from lacuna.data_pipelines.readers.openimages.folders import NOWHERE, PARTS

_COLUMNS = ("ImageID", "Source", "LabelName", "Confidence")
_BLOCK_BYTES = 8 << 20
_HUMAN, _POSITIVE = 1, 2  # bits of a row's code, below the class
_CLASS_SHIFT = 2
Place = Callable[[int, np.ndarray], np.ndarray]  # (part, ascending image ids) → number of the folder or NOWHERE


@dataclass(frozen=True)
class Grouped:
    images: np.ndarray  # uint64, ascending: every image with a label row
    place: np.ndarray  # uint16, which folder holds it
    labels: SparseLabels  # of the images that some folder holds
    contradictions: int  # pairs left unknown because humans disagree


class LabelRows:
    """Rows that count, and how many do not."""

    def __init__(self, classes: int):
        self.classes = classes
        self.count = self.other_classes = self.machine = 0
        self._parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(PARTS)]

    def add_files(self, paths: list[str], mids: list[str], machine_confidence: float | None) -> None:
        index = {mid: number for number, mid in enumerate(mids)}
        for path in paths:
            for batch in _batches(path):
                self._add(batch, path, index, machine_confidence)
        if not self.count:
            raise UserError(f"{', '.join(paths)}: no label rows. Download the CSV again.")
        if not any(self._parts):
            raise UserError(f"{', '.join(paths)}: none of the {self.count:,} label rows counts: {self.other_classes:,} "
                            "are of classes that --classes and --class-list do not name, "
                            + self._machine_words(machine_confidence))

    def _machine_words(self, machine_confidence: float | None) -> str:
        if machine_confidence is None:
            return (f"{self.machine:,} were made by machines. Give the human-verified CSV, or take machine rows as "
                    "positives with --machine-confidence (0.5, for example).")
        return (f"{self.machine:,} were made by machines less sure than --machine-confidence {machine_confidence}. "
                "Lower it, or give the human-verified CSV.")

    def _add(self, batch: pa.RecordBatch, path: str, index: dict[str, int], machine_confidence: float | None) -> None:
        human = ~per_value(batch["Source"], lambda text: text.startswith("machine"), bool)
        classes = per_value(batch["LabelName"], lambda text: index.get(text, -1), np.int32)
        confidence = _confidence(batch["Confidence"], path)
        odd = human & (confidence != 0) & (confidence != 1)
        if odd.any():
            first = int(np.argmax(odd))
            raise UserError(f"{path}: image {batch['ImageID'][first]} has a human label with confidence "
                            f"{confidence[first]}; legal: 0 and 1.")
        sure = (confidence >= machine_confidence) if machine_confidence is not None else np.zeros(len(human), bool)
        keep = (classes >= 0) & (human | sure)
        self.count += len(human)
        self.other_classes += int((classes < 0).sum())
        self.machine += int((~human & ~sure).sum())
        images = _parse_ids(batch["ImageID"], keep, path)
        codes = (classes[keep].astype(np.uint32) << _CLASS_SHIFT) | (human[keep] * np.uint32(_HUMAN)) | (
            (confidence[keep] > 0) * np.uint32(_POSITIVE))
        part = (images >> np.uint64(56)).astype(np.uint8)
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(PARTS + 1))
        for number in np.flatnonzero(np.diff(bounds)):
            rows = order[bounds[number]:bounds[number + 1]]
            self._parts[number].append((images[rows], codes[rows]))

    def group(self, place: Place) -> Grouped:
        """Labels per image; the rows are used up."""
        images, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint16)]
        held: list[SparseLabels] = []
        contradictions = 0
        for number in range(PARTS):
            rows, self._parts[number] = self._parts[number], []
            if not rows:
                continue
            columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
            ids, labels, conflicts = _group(columns[0], columns[1], self.classes)
            images.append(ids)
            places.append(place(number, ids))
            held.append(labels.take(np.flatnonzero(places[-1] != NOWHERE)))
            contradictions += conflicts
        return Grouped(np.concatenate(images), np.concatenate(places), SparseLabels.joined(held), contradictions)


def _group(images: np.ndarray, codes: np.ndarray, classes: int) -> tuple[np.ndarray, SparseLabels, int]:
    """(image ids ascending, labels, number of contradictory pairs)."""
    image_ids, image_row = np.unique(images, return_inverse=True)
    # One number for (image, class, answer), sorted once: repeats and contradictions become neighbours.
    answers = (image_row.astype(np.int64) * classes + (codes >> _CLASS_SHIFT)) * 2 + ((codes & _POSITIVE) > 0)
    human = (codes & _HUMAN) > 0
    if not human.all():
        asked = np.isin(answers >> 1, answers[human] >> 1)  # pairs that a human answered
        answers = answers[human | ~asked]
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


def per_value(column: pa.Array, answer, dtype) -> np.ndarray:
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
    bad = pc.binary_length(kept).to_numpy(zero_copy_only=False) != 16
    if not bad.any():
        # All are 16 bytes long, so Arrow's text buffer is a matrix; `kept` is fresh from a filter, without an offset.
        digits = _HEX[np.frombuffer(kept.buffers()[2], np.uint8, 16 * len(kept))].reshape(-1, 16)
        bad = (digits == 255).any(axis=1)
    if bad.any():
        raise UserError(f"{path}: ImageID {kept[int(np.argmax(bad))].as_py()!r} is not 16 lower-case hex digits.")
    octets = (digits[:, 0::2] << 4) | digits[:, 1::2]
    return octets.copy().view(">u8").ravel().astype(np.uint64)
