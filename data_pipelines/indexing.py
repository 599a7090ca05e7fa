"""Indexes WebDataset tars that were made elsewhere: index.json, member tables and the sidecar `labels` beside them.

A sample is a run of members with one key: one image (.jpg, .jpeg, .png, .webp) and its labels, the first found of
    .cls    a class id, or several parted by white space
    .json   an id or name, a list of them, or {"positives": [...], "negatives": [...]}
    .txt    ids or names, parted by commas or white space
Other members are not read. Everything is read before anything is written, and index.json is written last.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.basics.whole_number import whole_number
from lacuna.data_pipelines.index import UNLISTED_WORDS, Shard, ShardIndex, SidecarWriter
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.data_pipelines.packing import SIDECAR_NAME
from lacuna.data_pipelines.readers.base import IMAGE_EXTENSIONS, ClassNames, read_class_list, refuse_conflict
from lacuna.data_pipelines.shard_tables import Members
from lacuna.data_pipelines.tar_scan import Member, scan

LABEL_EXTENSIONS = ("cls", "json", "txt")


@dataclass(frozen=True)
class IndexOptions:
    classes: str | None = None  # class list file; without it labels must be numbers
    split: str = "train"
    unlisted: str = "unknown"
    labels_from: str | None = None  # read only this one of LABEL_EXTENSIONS
    allow_unlabelled: bool = False


@dataclass
class Row:
    """One sample while its members are being read."""

    key: str
    image: Member | None = None
    extension: str = ""
    labels: dict[str, bytes] = field(default_factory=dict)  # extension → content


class ClassNumbers(ClassNames):
    """Stands in for a class list: any number ≥ 0 is a class."""

    def __init__(self) -> None:
        super().__init__([], [])

    def index(self, text: str | int, where: str) -> int:
        token = str(text).strip()
        index = whole_number(token)
        if index is None:
            raise UserError(f"{where}: {token!r} is no class id ≥ 0. If it is a name, give the class list: --classes.")
        return index


def index_tars(url: str, options: IndexOptions, *, workers: int = 0,
               advance: Callable[[int], None] | None = None) -> ShardIndex:
    """Index all tars of the folder, in the order of their names; `advance(1)` is called for every tar."""
    names, class_ids = read_class_list(options.classes) if options.classes else ([], [])
    resolver = ClassNames(names, class_ids) if names else ClassNumbers()
    if url.startswith(("http://", "https://")):
        raise UserError(f"{url}: the index is written beside the tars, and HTTP cannot be written to. Index them where "
                        "they are stored, or copy them to a folder.")
    tars = _tar_names(url)
    scanned: list[tuple[Members, SparseLabels]] = []
    with ThreadPoolExecutor(workers or min(16, 2 * (os.cpu_count() or 1))) as pool:
        for result in pool.map(lambda name: _read_tar(storage.join(url, name), resolver, options), tars):
            scanned.append(result)
            if advance is not None:
                advance(1)
    if not sum(len(members.keys) for members, _ in scanned):
        raise UserError(f"{url}: its {len(tars)} tars hold no sample. Expected members like key.jpg and key.cls.")
    if not names:
        names = [str(c) for c in range(1 + max((int(ids.max()) for _, labels in scanned
                                                for ids in (labels.pos_ids, labels.neg_ids) if len(ids)), default=0))]
    return _write(url, tars, scanned, names, class_ids, options)


def _write(url: str, tars: list[str], scanned: list[tuple[Members, SparseLabels]], classes: list[str],
           class_ids: list[str], options: IndexOptions) -> ShardIndex:
    shards = [Shard(name, len(members.keys), storage.size(storage.join(url, name)))
              for name, (members, _) in zip(tars, scanned, strict=True)]
    source = {"made_by": "lacuna shards index", "classes": options.classes}
    index = ShardIndex(url, classes, shards, options.split, "image", class_ids, source)
    sidecar = SidecarWriter(index, SIDECAR_NAME, UNLISTED_WORDS[options.unlisted], source)
    first = 0
    for number, (members, labels) in enumerate(scanned):
        positions = np.arange(first, first + len(members.keys))
        first += len(members.keys)
        table = Members(members.keys, members.extensions, members.offsets, members.sizes, positions)
        storage.write_atomic(index.members_url(number), table.to_bytes(), durable=False)
        sidecar.write(number, labels)
    sidecar.close()
    index.save()
    return index


def _tar_names(url: str) -> list[str]:
    names = storage.list_names(url)
    tars = [name for name in names if name.endswith(".tar")]
    if not tars:
        packed = [name for name in names if name.endswith((".tar.gz", ".tgz"))]
        raise UserError(f"{url}: no .tar file there"
                        f"{f'; unpack {packed[0]} and the like to .tar first' if packed else ''}. Check the path.")
    return tars


def _read_tar(url: str, resolver: ClassNames, options: IndexOptions) -> tuple[Members, SparseLabels]:
    wanted = (options.labels_from,) if options.labels_from else LABEL_EXTENSIONS
    rows: dict[str, Row] = {}
    last: str | None = None
    for member in scan(url):
        parts = member.key_and_extension()
        if parts is None or parts[1].lower() not in (*IMAGE_EXTENSIONS, *wanted):
            continue
        key, extension = parts
        if key != last and key in rows:
            raise UserError(f"{url}: key {key!r} occurs twice, with others between. Make the tar with unique keys.")
        row, last = rows.setdefault(key, Row(key)), key
        if extension.lower() in IMAGE_EXTENSIONS:
            if row.image is not None:
                raise UserError(f"{url}: key {key!r} has two images ({row.image.name}, {member.name}). Keep one.")
            row.image, row.extension = member, extension
        else:
            row.labels[extension.lower()] = member.read()
    return _finish(url, list(rows.values()), resolver, options)


def _finish(url: str, rows: list[Row], resolver: ClassNames, options: IndexOptions) -> tuple[Members, SparseLabels]:
    positives, negatives, offsets, sizes = [], [], [], []
    for row in rows:
        where = f"{url}: key {row.key!r}"
        if row.image is None:
            raise UserError(f"{where} has labels but no image ({', '.join(IMAGE_EXTENSIONS)}). Remove it from the tar.")
        offsets.append(row.image.offset)
        sizes.append(row.image.size)
        pos, neg = _row_labels(row, where, resolver, options)
        refuse_conflict(pos, neg, where)
        positives.append(pos)
        negatives.append(neg)
    members = Members([row.key for row in rows], [row.extension for row in rows], np.array(offsets, np.int64),
                      np.array(sizes, np.int64), np.arange(len(rows)))
    return members, SparseLabels.from_lists(positives, negatives, UNLISTED_WORDS[options.unlisted])


def _row_labels(row: Row, where: str, resolver: ClassNames, options: IndexOptions) -> tuple[list[int], list[int]]:
    for extension in LABEL_EXTENSIONS:
        if extension in row.labels:
            return parse_labels(row.labels[extension], extension, f"{where} (.{extension})", resolver)
    if options.allow_unlabelled:
        return [], []
    raise UserError(f"{where} has no .{', .'.join(LABEL_EXTENSIONS)} member. If none is meant to have labels, use "
                    "--allow-unlabelled; if the tar came from `lacuna shards make`, run that again with --overwrite.")


def parse_labels(data: bytes, extension: str, where: str, resolver: ClassNames) -> tuple[list[int], list[int]]:
    """(positives, negatives) of one label member."""
    try:
        text = data.decode()
        if extension != "json":
            return resolver.indices(text, where), []
        body = parse_json(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error}).") from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}).") from None
    if isinstance(body, dict):
        if "positives" not in body or not set(body) <= {"positives", "negatives"}:
            raise UserError(f'{where}: keys {sorted(body)}; legal: "positives" (a list) and "negatives" (a list). If '
                            "the labels are in another member, choose it with --labels-from.")
        return _tokens(body["positives"], where, resolver), _tokens(body.get("negatives", []), where, resolver)
    return _tokens(body if isinstance(body, list) else [body], where, resolver), []


def _tokens(values: object, where: str, resolver: ClassNames) -> list[int]:
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int | str) for v in values):
        raise UserError(f"{where}: {values!r}; expected a list of class ids or names.")
    return [resolver.index(value, where) for value in values]
