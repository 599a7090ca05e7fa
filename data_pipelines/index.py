"""The shard index and label sidecars: what is known before a tar is opened.

A dataset folder holds:
    index.json                  shards (name, rows, bytes), class list, split, sample kind, fingerprint
    shard-00000.tar             WebDataset tar: one `<key>.<ext>` member a sample
    members/shard-00000.npz     keys, extension, offset and size of every row's member in the tar, and its position
                                in the source's own order (annotation protocols draw in that order)
    labels/<name>.json          a sidecar: what it is, class counts, a hash per shard
    labels/<name>/shard-00000.npz   its sparse positive and negative ids
Every simulated annotation is another sidecar over the same tars.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.labels import NEGATIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.shard_tables import Members, labels_from_bytes, labels_to_bytes

INDEX_NAME = "index.json"
INDEX_VERSION = 1
SIDECAR_VERSION = 1
UNLISTED_WORDS = {"unknown": UNKNOWN, "negative": NEGATIVE}


@dataclass(frozen=True)
class Shard:
    name: str  # "shard-00000.tar"
    count: int  # samples
    bytes: int

    @property
    def stem(self) -> str:
        return self.name.rsplit(".", 1)[0]

    def to_json(self) -> dict:
        """As in index.json and in the fingerprint, for which the count is called "rows" in every dataset there is."""
        return {"name": self.name, "rows": self.count, "bytes": self.bytes}


@dataclass(frozen=True)
class ShardIndex:
    """A dataset: `url` is the folder that holds index.json."""

    url: str
    classes: list[str]  # class names in id order
    shards: list[Shard]
    split: str = "train"
    kind: str = "image"  # or "feature": members are .npy vectors
    class_ids: list[str] = field(default_factory=list)  # WNIDs, MIDs, category ids: stable names; may be empty
    source: dict = field(default_factory=dict)  # how it was made, for humans

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [shards]: number of samples of every shard."""
        return np.array([s.count for s in self.shards], dtype=np.int64)

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Names what the shards are; state and checkpoints refuse a dataset with another one."""
        text = json.dumps([[s.to_json() for s in self.shards], self.classes, self.class_ids, self.kind], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def shard_url(self, shard: int) -> str:
        return storage.join(self.url, self.shards[shard].name)

    def members_url(self, shard: int) -> str:
        return storage.join(self.url, "members", self.shards[shard].stem + ".npz")

    def members(self, shard: int) -> Members:
        url = self.members_url(shard)
        try:
            members = Members.from_bytes(storage.read_bytes(url), url)
        except FileNotFoundError:
            raise UserError(f"{url} is missing. Rebuild it with `lacuna shards index {self.url}`.") from None
        if len(members.keys) != self.shards[shard].count:
            raise UserError(
                f"{url}: has {len(members.keys)} rows, index.json says {self.shards[shard].count}. "
                f"Rebuild both with `lacuna shards index {self.url}`."
            )
        return members

    def save(self) -> None:
        body = {
            "version": INDEX_VERSION, "split": self.split, "kind": self.kind, "classes": self.classes,
            "class_ids": self.class_ids, "source": self.source, "fingerprint": self.fingerprint,
            "shards": [s.to_json() for s in self.shards],
        }
        storage.write_atomic(storage.join(self.url, INDEX_NAME), json.dumps(body, indent=1).encode())

    @classmethod
    def load(cls, url: str) -> ShardIndex:
        where = storage.join(url, INDEX_NAME)
        try:
            body = parse_json(storage.read_bytes(where))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{where}: no such file. Build it with `lacuna shards make` or, for tars made elsewhere, "
                            f"`lacuna shards index {url}`.") from None
        except UserError:
            raise  # of the storage
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error}). "
                            f"Rebuild it with `lacuna shards index {url}`.") from None
        try:
            if body["version"] != INDEX_VERSION:
                raise UserError(f"{where}: version {body['version']!r}, this program reads version {INDEX_VERSION}.")
            index = cls(
                url=url, classes=[str(c) for c in body["classes"]],
                shards=[Shard(str(s["name"]), int(s["rows"]), int(s["bytes"])) for s in body["shards"]],
                split=str(body["split"]), kind=str(body["kind"]),
                class_ids=[str(c) for c in body["class_ids"]], source=dict(body["source"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{where}: damaged ({type(error).__name__}: {error}). "
                            f"Rebuild it with `lacuna shards index {url}`.") from None
        index._check(where, body.get("fingerprint"))
        return index

    def _check(self, where: str, fingerprint: str | None) -> None:
        for shard in self.shards:
            if "/" in shard.name or shard.name in ("", ".", "..") or shard.count < 0 or shard.bytes < 0:
                raise UserError(f"{where}: shard entry {shard} is not a file name in this folder with counts ≥ 0.")
        if self.kind not in ("image", "feature"):
            raise UserError(f"{where}: kind is {self.kind!r}, legal: 'image', 'feature'.")
        if fingerprint != self.fingerprint:
            raise UserError(f"{where}: fingerprint {fingerprint!r} does not fit its content ({self.fingerprint!r}): "
                            f"it was edited by hand. Rebuild it with `lacuna shards index {self.url}`.")


@dataclass(frozen=True)
class Sidecar:
    """One set of labels over an index's shards, read shard by shard."""

    index: ShardIndex
    name: str
    unlisted: int  # value of a class that a row lists nowhere: UNKNOWN, or NEGATIVE for full labels
    positives: np.ndarray  # int64 [L] positives per class over all shards
    negatives: np.ndarray  # int64 [L]
    hashes: list[str]  # sha256 of every shard's file
    source: dict

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.index.fingerprint, self.unlisted, self.hashes])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def labels(self, shard: int) -> SparseLabels:
        """Labels of one shard; its file's hash is checked."""
        url = _labels_url(self.index, self.name, shard)
        try:
            data = storage.read_bytes(url)
        except FileNotFoundError:
            raise UserError(f"{url} is missing. Make the sidecar {self.name!r} again.") from None
        if hashlib.sha256(data).hexdigest() != self.hashes[shard]:
            raise UserError(f"{url}: its content does not fit labels/{self.name}.json. Make the sidecar again.")
        labels = labels_from_bytes(data, url, self.unlisted)
        if len(labels) != self.index.shards[shard].count:
            raise UserError(f"{url}: {len(labels)} rows, index.json says {self.index.shards[shard].count}. "
                            "Make the sidecar again.")
        return labels

    @classmethod
    def load(cls, index: ShardIndex, name: str) -> Sidecar:
        where = storage.join(index.url, "labels", name + ".json")
        with opening(index, "labels", name, "label sidecar", f"Make one with `lacuna annotate {index.url}`.",
                     "Make the sidecar again."):
            body = parse_json(storage.read_bytes(where))
            fits = body["index_fingerprint"] == index.fingerprint
            sidecar = cls(index, name, UNLISTED_WORDS[body["unlisted"]], np.array(body["positives"], np.int64),
                          np.array(body["negatives"], np.int64), [str(h) for h in body["hashes"]], dict(body["source"]))
        if not fits or len(sidecar.hashes) != len(index.shards):
            raise UserError(f"{where}: made for another index than {index.url}/{INDEX_NAME} "
                            f"({index.fingerprint}). Make the sidecar again.")
        return sidecar


class SidecarWriter:
    """Writes a sidecar shard by shard (any order); `close` publishes it atomically."""

    def __init__(self, index: ShardIndex, name: str, unlisted: int, source: dict):
        if "/" in name or name in ("", ".", "..") or not name.isprintable():
            raise UserError(f"sidecar name {name!r}: use letters, digits, '-', '_' and '.'.")
        self.index, self.name, self.unlisted, self.source = index, name, unlisted, source
        classes = len(index.classes)
        self.positives, self.negatives = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
        self.hashes: dict[int, str] = {}

    def write(self, shard: int, labels: SparseLabels) -> None:
        url = _labels_url(self.index, self.name, shard)
        labels.check(len(self.index.classes), url)
        if len(labels) != self.index.shards[shard].count:
            raise UserError(f"{url}: {len(labels)} label rows for {self.index.shards[shard].count} samples.")
        data = labels_to_bytes(labels)
        storage.write_atomic(url, data, durable=False)
        pos, neg = labels.class_counts(len(self.index.classes))
        self.positives += pos
        self.negatives += neg
        self.hashes[shard] = hashlib.sha256(data).hexdigest()

    def close(self) -> Sidecar:
        missing = set(range(len(self.index.shards))) - set(self.hashes)
        assert not missing, f"sidecar {self.name}: shards {sorted(missing)[:5]} never written"
        hashes = [self.hashes[s] for s in range(len(self.index.shards))]
        word = {v: k for k, v in UNLISTED_WORDS.items()}[self.unlisted]
        body = {
            "version": SIDECAR_VERSION, "index_fingerprint": self.index.fingerprint, "unlisted": word,
            "positives": self.positives.tolist(), "negatives": self.negatives.tolist(), "source": self.source,
            "hashes": hashes,
        }
        storage.write_atomic(storage.join(self.index.url, "labels", self.name + ".json"), json.dumps(body).encode())
        return Sidecar.load(self.index, self.name)


def sidecar_names(index: ShardIndex) -> list[str]:
    return names_in(index, "labels")


def names_in(index: ShardIndex, folder: str) -> list[str]:
    """Of what has a description NAME.json in a folder beside the index."""
    names = storage.list_names(storage.join(index.url, folder))
    return [n.removesuffix(".json") for n in names if n.endswith(".json")]


@contextlib.contextmanager
def opening(index: ShardIndex, folder: str, name: str, kind: str, make: str, again: str) -> Iterator[None]:
    """While such a description and its data are read: what is said if they are not there, or not what was written."""
    where = storage.join(index.url, folder, name + ".json")
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{where}: no {kind} named {name!r}; there are {names_in(index, folder) or 'none'}. "
                        f"{make}") from None
    except UserError:
        raise  # of the storage
    except (KeyError, TypeError, ValueError, OverflowError, EOFError) as error:
        raise UserError(f"{where}: damaged ({type(error).__name__}: {error}). {again}") from None


def _labels_url(index: ShardIndex, name: str, shard: int) -> str:
    return storage.join(index.url, "labels", name, index.shards[shard].stem + ".npz")
