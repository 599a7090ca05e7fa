"""What is exchanged: of every sample the known labels and, apart from them, what a model suggests, all by name."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.index import UNLISTED_WORDS
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.source import ShardSource

ABOUT = "lacuna.json"  # beside the format's own files: what it has no place for; files of other tools lack it
IMAGES = "images"


@dataclass
class Marks:
    """Of one sample; names in the order of the class list."""

    positives: list[str] = field(default_factory=list)
    negatives: list[str] = field(default_factory=list)
    suggested: dict[str, float] = field(default_factory=dict)  # name → score, of entries that are not known


@dataclass
class Bundle:
    classes: list[str]
    samples: dict[str, Marks]  # by key
    files: dict[str, str] = field(default_factory=dict)  # key → file name, `key.extension`; empty for feature vectors
    unlisted: str = "unknown"  # what an entry without a mark is: unknown or negative

    def ordered(self, names: dict[str, float] | list[str]) -> list[str]:
        return sorted(names, key={name: i for i, name in enumerate(self.classes)}.__getitem__)

    def only(self, keys: list[str]) -> Bundle:
        return Bundle(self.classes, {key: self.samples[key] for key in keys},
                      {key: self.files[key] for key in keys if key in self.files}, self.unlisted)


def bundle_of(source: ShardSource, decided: dict[tuple[int, int, int], int],
              suggested: dict[tuple[int, int, int], float]) -> Bundle:
    """The labels of a sidecar with decisions laid over them, and suggestions about what is left unknown."""
    index, names = source.index, source.index.classes
    if len(set(names)) != len(names):
        raise UserError(f"{index.url}: two classes have one name; other tools know classes by their names.")
    found = Bundle(list(names), {}, {}, next(w for w, v in UNLISTED_WORDS.items() if v == source.sidecar.unlisted))
    laid = _by_sample(decided)
    scores = _by_sample(suggested)
    for shard in range(len(index.shards)):
        members, labels = index.members(shard), source.sidecar.labels(shard)
        for row, key in enumerate(members.keys):
            known = {**dict.fromkeys(labels.positives(row).tolist(), True),
                     **dict.fromkeys(labels.negatives(row).tolist(), False),
                     **{cls: value == POSITIVE for cls, value in laid.get((shard, row), {}).items()}}
            yes, no = ([names[c] for c in sorted(known) if known[c] == wanted] for wanted in (True, False))
            marks = Marks(yes, no, {names[c]: score for c, score in sorted(scores.get((shard, row), {}).items())
                                    if c not in known})
            if key in found.samples:
                raise UserError(f"{index.url}: two samples have the key {key!r}; other tools know them by their keys.")
            found.samples[key] = marks
            if index.kind == "image":
                found.files[key] = f"{key}.{members.extensions[row]}"
    return found


def _by_sample(entries: dict) -> dict[tuple[int, int], dict]:
    found: dict[tuple[int, int], dict] = {}
    for (shard, row, cls), value in entries.items():
        found.setdefault((shard, row), {})[cls] = value
    return found


def images_of(bundle: Bundle, source: ShardSource) -> Iterator[tuple[str, bytes]]:
    """(file name, bytes) of the bundle's samples, shard by shard."""
    for shard in range(len(source.index.shards)):
        opened = source.open(shard)
        for row, key in enumerate(opened.members.keys):
            if key in bundle.samples:
                yield bundle.files[key], opened.read(row)


def copy_images(bundle: Bundle, out: str, source: ShardSource, folder: str = IMAGES) -> None:
    for name, data in images_of(bundle, source):
        if posixpath.normpath(name) != name or name.startswith(("/", "..")):
            raise UserError(f"sample {name!r}: its key leads out of a folder, so no file is written for it.")
        storage.write_atomic(storage.join(out, folder, name), data)


def key_of(file_name: str, folder: str = IMAGES) -> str:
    """Of a path or URL that another tool gives back: what follows the folder of images."""
    start = folder + "/"
    name = file_name[len(start) :] if file_name.startswith(start) else file_name.partition("/" + start)[2] or file_name
    return posixpath.splitext(name)[0]


def write_about(bundle: Bundle, out: str, form: str) -> None:
    write_json(out, ABOUT, {"format": form, "classes": bundle.classes, "unlisted": bundle.unlisted})


def read_about(folder: str) -> dict:
    """Empty if another tool made the files."""
    try:
        return read_json(folder, ABOUT)
    except UserError:
        return {}


def write_json(out: str, name: str, body: object) -> None:
    storage.write_atomic(storage.join(out, name), json.dumps(body, ensure_ascii=False, indent=1).encode())


def read_text(folder: str, name: str) -> str:
    where = storage.join(folder, name)
    try:
        return storage.read_bytes(where).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{where}: no such file. Give the folder that holds it.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}).") from None


def read_json(folder: str, name: str):
    try:
        return parse_json(read_text(folder, name).encode())
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{storage.join(folder, name)}: not valid JSON ({error}).") from None
