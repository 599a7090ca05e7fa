"""A text table: `path<TAB>positive classes<TAB>negative classes`, one line a sample.

A class is an index 0..L-1, a stable id or a name of the class list; several are parted by commas or, if there is none,
by white space. Also read: comma tables as the Hill/SPLC (`file,3 17 60`) and CSL (`file,"['/m/1']","['/m/2']",train`)
repositories publish them. In a table with four or more columns the last one is the split; other splits are left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import UNLISTED_WORDS
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.data_pipelines.readers.base import (
    ClassNames,
    Dataset,
    file_sample,
    read_class_list,
    read_lines,
    refuse_conflict,
    without_missing,
)

_HEADER_WORDS = {"path", "filename", "file", "image", "key", "img_path"}


def configure(group) -> None:
    group.add_argument("--table", required=True, metavar="FILE", help="the table")
    group.add_argument("--classes", required=True, metavar="FILE", help="class list: `name` or `id<TAB>name` a line")
    group.add_argument("--images", default="", metavar="DIR", help="folder or URL that the paths are relative to")
    group.add_argument("--split", default="train", help="name to record, and the value of a split column")
    group.add_argument("--unlisted", choices=sorted(UNLISTED_WORDS), default="unknown",
                       help="what a class in neither list is (default: unknown)")
    group.add_argument("--skip-missing", action="store_true", help="leave out samples without an image file")


def read(table: str, classes: str, images: str = "", split: str = "train", unlisted: str = "unknown",
         skip_missing: bool = False) -> Dataset:
    names, class_ids = read_class_list(classes)
    samples, positives, negatives = [], [], []
    for path, pos, neg, _ in table_rows(table, split, ClassNames(names, class_ids)):
        samples.append(file_sample(storage.join(images, path) if images else path, path))
        positives.append(pos)
        negatives.append(neg)
    labels = SparseLabels.from_lists(positives, negatives, UNLISTED_WORDS[unlisted])
    dataset = Dataset(names, samples, labels, split, class_ids, source={"reader": "tsv", "table": table})
    return without_missing(dataset, skip_missing)


def table_rows(url: str, split: str, names: ClassNames) -> Iterator[tuple[str, list[int], list[int], str]]:
    """(first column, positives, negatives, file:line) of every line of the split."""
    lines = read_lines(url)
    tabs = bool(lines) and "\t" in lines[0]
    for number, fields in enumerate(csv.reader(lines, delimiter="\t" if tabs else ",", quotechar=None if tabs else '"',
                                               quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL), 1):
        where = f"{url}:{number}"
        if number == 1 and fields and fields[0].strip().lower() in _HEADER_WORDS:
            continue
        if not fields or not fields[0].strip():
            raise UserError(f"{where}: no path in the first column. Write `path<TAB>positives<TAB>negatives`.")
        if len(fields) >= 4 and fields[-1].strip() != split:
            continue
        positives = names.indices(fields[1], where) if len(fields) > 1 else []
        negatives = names.indices(fields[2], where) if len(fields) > 2 else []
        refuse_conflict(positives, negatives, where)
        yield fields[0].strip(), positives, negatives, where
