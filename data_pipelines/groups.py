"""Groups of samples that belong together: a video's frames, a burst, a recording's clips, a patient's images.

`groups/<name>.json` (what they are, a hash) beside `groups/<name>.npy`: the group's number of every row, shard after
shard, or -1. Frames of one video must not be on both sides of a split, and a model may be asked to say the same of them
on average (train.group_weight).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.flag_text import flag_lines
from lacuna.basics.json_text import parse_json
from lacuna.basics.npy_header import alone
from lacuna.data_pipelines.index import INDEX_NAME, ShardIndex, names_in, opening

GROUPS_VERSION = 1


@dataclass(frozen=True)
class Groups:
    index: ShardIndex
    name: str
    numbers: np.ndarray  # int32 [N]: of all shards' rows, counted through; -1: in no group
    source: dict = field(default_factory=dict)  # how they were made, for humans

    @cached_property
    def count(self) -> int:
        return int(self.numbers.max(initial=-1)) + 1

    @cached_property
    def by_shard(self) -> list[np.ndarray]:
        return np.split(self.numbers, np.cumsum(self.index.counts)[:-1]) if len(self.index.shards) else []

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.index.fingerprint.encode() + self.numbers.astype("<i4").tobytes()).hexdigest()[:16]

    def save(self) -> None:
        """Write the numbers, then the description that names them."""
        buffer = io.BytesIO()
        np.save(buffer, self.numbers.astype(np.int32))
        storage.write_atomic(_url(self.index, self.name, ".npy"), buffer.getvalue())
        body = {"version": GROUPS_VERSION, "index_fingerprint": self.index.fingerprint, "groups": self.count,
                "fingerprint": self.fingerprint, "source": self.source}
        storage.write_atomic(_url(self.index, self.name, ".json"), json.dumps(body).encode())

    @classmethod
    def load(cls, index: ShardIndex, name: str) -> Groups:
        where = _url(index, name, ".json")
        again = f"Make them again with `lacuna annotate {index.url} --scheme groups`."
        make = f"Make them with `lacuna annotate {index.url} --scheme groups`."
        with opening(index, "groups", name, "groups", make, again):
            body = parse_json(storage.read_bytes(where))
            made_for, fingerprint, version = body["index_fingerprint"], body["fingerprint"], body["version"]
            data = storage.read_bytes(_url(index, name, ".npy"))
            numbers = alone(lambda: np.load(io.BytesIO(data), allow_pickle=False))
            groups = cls(index, name, numbers, dict(body["source"]))
            fits = groups.numbers.shape == (index.samples,) and groups.fingerprint == fingerprint
        if version != GROUPS_VERSION:
            raise UserError(f"{where}: version {version!r}, this program reads version {GROUPS_VERSION}. {again}")
        if made_for != index.fingerprint or not fits:
            raise UserError(f"{where}: made for another index than {index.url}/{INDEX_NAME} ({index.fingerprint}), or "
                            f"its numbers were changed. {again}")
        return groups


def make_groups(index: ShardIndex, name: str, group_of: Callable[[str], str | None], source: dict) -> Groups:
    """Of the samples' keys; numbered as they come, shard after shard."""
    if "/" in name or name in ("", ".", ".."):
        raise UserError(f"--name {name!r}: use letters, digits, '-', '_' and '.'.")
    known: dict[str, int] = {}
    numbers = np.full(index.samples, -1, np.int32)
    place = 0
    for shard in range(len(index.shards)):
        for key in index.members(shard).keys:
            group = group_of(key)
            if group is not None:
                numbers[place] = known.setdefault(group, len(known))
            place += 1
    if not known:
        raise UserError(f"no sample of {index.url} is in a group; its keys look like {index.members(0).keys[:3]}.")
    groups = Groups(index, name, numbers, source)
    groups.save()
    return groups


def by_pattern(pattern: str) -> Callable[[str], str | None]:
    """The part of a key that the first bracket of a regular expression takes."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--pattern {pattern!r}: no regular expression ({error}).") from None
    if wanted.groups < 1:
        raise UserError(f"--pattern {pattern!r}: put brackets around the part of the key that names the group, as in "
                        "'^(.*)_[0-9]+$'.")
    return lambda key: found.group(1) if (found := wanted.search(key)) else None


def by_table(url: str) -> Callable[[str], str | None]:
    """Lines `key<TAB>group`."""
    lines = flag_lines("--table", url, "Give one line `key<TAB>group` for each sample.")
    table: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        key, tab, group = line.partition("\t")
        if line.strip() and (not tab or not key or not group.strip() or table.setdefault(key, group) != group):
            raise UserError(f"{url}, line {number}: {line!r} is not `key<TAB>group`, or the key had another group.")
    return table.get


def group_names(index: ShardIndex) -> list[str]:
    return names_in(index, "groups")


def _url(index: ShardIndex, name: str, suffix: str) -> str:
    return storage.join(index.url, "groups", name + suffix)
