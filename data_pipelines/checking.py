"""Verifies a dataset: does every sample of the index lie in its tar, decode, and have legal labels?"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import DecodeError, decode_image, decode_vector
from lacuna.data_pipelines.index import ShardIndex, Sidecar, sidecar_names
from lacuna.data_pipelines.shard_tables import Members
from lacuna.data_pipelines.tar_scan import Member, scan


@dataclass(frozen=True)
class Problem:
    """What is wrong with which sample; row and key are None when it concerns the whole shard or dataset."""

    shard: str | None
    problem: str
    row: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        place = self.shard or "dataset"
        place += f" row {self.row}" if self.row is not None else ""
        place += f" key {self.key!r}" if self.key is not None else ""
        return f"{place}: {self.problem}"


@dataclass
class Report:
    samples: int
    shards: int
    sidecars: list[str]
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


@dataclass
class ShardFindings:
    problems: list[Problem] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    dimensions: set[int] = field(default_factory=set)
    counts: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # sidecar → (positives, negatives)


def check(url: str, *, decode: bool = True, workers: int = 0, advance: Callable[[int], None] | None = None) -> Report:
    """Check the dataset at `url`; `advance(rows)` is told about finished rows."""
    index = ShardIndex.load(url)
    report = Report(index.samples, len(index.shards), sidecar_names(index))
    sidecars = []
    for name in report.sidecars:
        try:
            sidecars.append(Sidecar.load(index, name))
        except UserError as error:
            report.problems.append(Problem(None, str(error)))
    if not report.sidecars:
        report.problems.append(Problem(None, "has no label sidecar"))
    checker = ShardChecker(index, sidecars, decode)
    findings = []
    # Threads: the decoders work outside the interpreter lock, and a process would first import torch.
    with ThreadPoolExecutor(workers or (os.cpu_count() or 1)) as pool:
        for number, found in enumerate(pool.map(checker.check, range(len(index.shards)))):
            findings.append(found)
            report.problems += found.problems
            if advance is not None:
                advance(index.shards[number].count)
    _compare_shards(index, sidecars, findings, report)
    return report


@dataclass(frozen=True)
class ShardChecker:
    index: ShardIndex
    sidecars: list[Sidecar]
    decode: bool

    def check(self, shard: int) -> ShardFindings:
        found = ShardFindings()
        name, url = self.index.shards[shard].name, self.index.shard_url(shard)
        self._check_labels(shard, found)
        try:
            members = self.index.members(shard)
            found.keys = members.keys
            self._check_table(name, members, found)
            size, expected = storage.size(url), self.index.shards[shard].bytes
            if size != expected:
                found.problems.append(Problem(name, f"{size:,} bytes, index.json says {expected:,}"))
            self._walk(name, url, members, found)
        except FileNotFoundError:
            found.problems.append(Problem(name, f"{url}: no such file"))
        except UserError as error:
            found.problems.append(Problem(name, str(error)))
        return found

    def _check_labels(self, shard: int, found: ShardFindings) -> None:
        for sidecar in self.sidecars:
            try:
                labels = sidecar.labels(shard)
                labels.check(len(self.index.classes), f"sidecar {sidecar.name}")
                found.counts[sidecar.name] = labels.class_counts(len(self.index.classes))
            except UserError as error:
                found.problems.append(Problem(self.index.shards[shard].name, str(error)))

    def _check_table(self, name: str, members: Members, found: ShardFindings) -> None:
        seen: dict[str, int] = {}
        for row, key in enumerate(members.keys):
            if seen.setdefault(key, row) != row:
                found.problems.append(Problem(name, f"same key as row {seen[key]}", row, key))
        for row in (np.flatnonzero(np.diff(members.offsets) <= 0) + 1).tolist():
            found.problems.append(Problem(name, "lies before the row that precedes it", row, members.keys[row]))

    def _walk(self, name: str, url: str, members: Members, found: ShardFindings) -> None:
        """Compare the tar's members with the table, and decode them."""
        at = {int(offset): row for row, offset in enumerate(members.offsets)}
        unseen = set(range(len(members.keys)))
        extensions = set(members.extensions)
        extra = 0
        for member in scan(url):
            row = at.get(member.offset)
            if row is None:
                parts = member.key_and_extension()
                extra += parts is not None and parts[1] in extensions
                continue
            unseen.discard(row)
            wanted = f"{members.keys[row]}.{members.extensions[row]}"
            if member.name != wanted or member.size != members.sizes[row]:
                text = (f"the tar has {member.name!r} of {member.size:,} bytes there, the index says {wanted!r} of "
                        f"{members.sizes[row]:,}")
                found.problems.append(Problem(name, text, row, members.keys[row]))
            elif self.decode:
                self._decode(name, row, members.keys[row], member, found)
        for row in sorted(unseen):
            found.problems.append(Problem(name, f"no member of the tar starts at byte {members.offsets[row]}", row,
                                          members.keys[row]))
        if extra:
            found.problems.append(Problem(name, f"the tar has {extra} samples that the index does not know"))

    def _decode(self, name: str, row: int, key: str, member: Member, found: ShardFindings) -> None:
        try:
            data = member.read()
            if self.index.kind == "feature":
                found.dimensions.add(len(decode_vector(data)))
            else:
                decode_image(data)
        except UserError as error:
            found.problems.append(Problem(name, str(error), row, key))
        except DecodeError as error:
            found.problems.append(Problem(name, f"cannot be decoded: {error}", row, key))


def _compare_shards(index: ShardIndex, sidecars: list[Sidecar], findings: list[ShardFindings], report: Report) -> None:
    """What no shard can see alone: keys that two shards share, class counts, vector sizes."""
    # `make` promises unique keys; tars made elsewhere often number their samples afresh in every tar.
    twice = report.problems if "reader" in index.source else report.warnings
    owner: dict[str, int] = {}
    for number, found in enumerate(findings):
        for row, key in enumerate(found.keys):
            first = owner.setdefault(key, number)
            if first != number:
                twice.append(Problem(index.shards[number].name, f"same key in {index.shards[first].name}", row, key))
    for sidecar in sidecars:
        counts = [found.counts[sidecar.name] for found in findings if sidecar.name in found.counts]
        if len(counts) != len(findings):
            continue  # a shard's labels were unreadable: reported there
        for word, kept, pair in (("positives", sidecar.positives, 0), ("negatives", sidecar.negatives, 1)):
            real = np.sum([count[pair] for count in counts], axis=0) if counts else np.zeros_like(kept)
            if not np.array_equal(real, kept):
                report.problems.append(Problem(None, f"labels/{sidecar.name}.json: its {word} per class do not fit its "
                                               "shards. Make the sidecar again"))
    sizes = set().union(*(found.dimensions for found in findings)) if findings else set()
    if len(sizes) > 1:
        report.problems.append(Problem(None, f"feature vectors of different sizes: {sorted(sizes)}"))
