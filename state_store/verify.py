"""Verification and statistics of a store: every object that snapshots name is checked; foreign files are named."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import DAMAGED
from lacuna.state_store.chunks import DamagedChunk, Ref, chunk_url, read_into
from lacuna.state_store.fields import Field
from lacuna.state_store.manifest import read_histogram, walk
from lacuna.state_store.schema import COPY, GROUP, written_metadata
from lacuna.state_store.store import StateStore
from lacuna.state_store.sweep import map_shards

_ENTRY = re.compile(r"\d{8}\.json")
_CLAIM = re.compile(r"\d+-\d+\.json")
_OBJECT = {"chunks": re.compile(r"\d{6,}\.\d+-\d+-\d+"), "histograms": re.compile(r"[a-z]\w*\.\d+-[0-9a-f]{12}"),
           "manifests": re.compile(r"\d+-[0-9a-f]{12}\.json"), "log": _ENTRY, "claims": _CLAIM}


@dataclass(frozen=True)
class Problem:
    kind: str  # missing, truncated, corrupt, metadata
    object: str
    snapshots: tuple[str, ...]  # those that need it
    text: str


@dataclass
class Report:
    snapshots: list[str] = field(default_factory=list)
    checked: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)  # left by a crash; the next launch removes them
    foreign: list[str] = field(default_factory=list)  # not ours: left alone


def verify(store: StateStore, names: list[str] | None = None, threads: int = 4) -> Report:
    """Read and decode every chunk that the snapshots (all by default) name."""
    report = Report()
    needed: dict[tuple[str, int, Ref], list[str]] = {}
    for entry in store.snapshots() if names is None else [store.entry(name) for name in names]:
        report.snapshots.append(entry.name)
        try:
            manifest = store.manifest(entry.name)
            for name, ref in manifest.histograms.items():
                read_histogram(store.url, name, ref)
        except UserError as error:
            report.problems.append(Problem("metadata", entry.manifest, (entry.name,), str(error)))
            continue
        for item in walk(manifest.refs):
            if item[0] in store.schema.fields and item[1] < store.schema.shards:
                needed.setdefault(item, []).append(entry.name)
            else:
                report.problems.append(Problem("metadata", entry.manifest, (entry.name,), f"names field {item[0]!r}, "
                                               f"shard {item[1]}, which the store's schema does not have"))
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(lambda item: _check(store, *item), needed)
        for (name, shard, ref), users, damage in zip(needed, needed.values(), results, strict=True):
            report.checked += 1
            report.bytes += ref.size
            if damage is not None:
                url = chunk_url(store.url, name, shard, ref.token)
                report.problems.append(Problem(damage.kind, url, tuple(users), str(damage)))
    _check_metadata(store, report)
    _list_strangers(store, report)
    return report


def _check(store: StateStore, name: str, shard: int, ref: Ref) -> DamagedChunk | None:
    spec = store.schema.fields[name]
    try:
        read_into(store.url, spec, shard, ref, np.empty((store.schema.max_rows, *spec.stored_shape), spec.stored_dtype))
    except DamagedChunk as error:
        return error
    return None


def _check_metadata(store: StateStore, report: Report) -> None:
    for name, data in written_metadata(store.schema).items():
        url = storage.join(store.url, name)
        try:
            same = storage.read_bytes(url) == data
        except FileNotFoundError:
            same = False
        if not same:
            text = f"{url} is missing or damaged. The next launch or `lacuna state verify --repair` writes it anew."
            report.problems.append(Problem("metadata", url, (), text))
    for entry in store.fence.entries():
        if entry.kind == DAMAGED:
            url = store.fence.entry_url(entry.number)
            text = (f"{url} is damaged. The next launch or `lacuna state verify --repair` takes a snapshot's entry "
                    "from the checkpoint that belongs to it.")
            report.problems.append(Problem("metadata", url, (), text))


def _list_strangers(store: StateStore, report: Report) -> None:
    places = [*(f"chunks/{name}" for name in store.schema.fields), *(k for k in _OBJECT if k != "chunks")]
    known = {GROUP, COPY, "chunks", *_OBJECT, *store.schema.fields}
    report.foreign += [name for name in storage.list_names(store.url) if name not in known]
    report.foreign += [f"chunks/{name}" for name in storage.list_names(storage.join(store.url, "chunks"))
                       if name not in store.schema.fields]
    for place in places:
        pattern = _OBJECT[place.split("/")[0]]
        report.foreign += [f"{place}/{name}" for name in storage.list_names(storage.join(store.url, place))
                           if not pattern.fullmatch(name) and not name.endswith(".partial")]
    try:
        report.orphans += ["/".join(item) for item in store.orphans()]
    except UserError:
        return  # a damaged manifest is reported already, and hides which objects are orphans


@dataclass(frozen=True)
class FieldStats:
    field: Field
    chunks: int
    written: int  # chunks that are not initial values any more
    stored_bytes: int
    logical_bytes: int  # of the written chunks
    values: tuple[float, float, float] | None  # smallest, mean, largest of the written chunks


def stats(store: StateStore, name: str, values: bool = False) -> list[FieldStats]:
    """Per field: how much is written and what it costs; with `values` a sweep over all written chunks."""
    reader, found = store.reader(name), []
    for spec in store.schema.fields.values():
        refs = reader.refs.get(spec.name, {})
        count = int(store.schema.counts[list(refs)].sum()) if refs else 0
        extent = _extent(reader, spec, sorted(refs)) if values and count else None
        found.append(FieldStats(spec, store.schema.shards, len(refs), sum(ref.size for ref in refs.values()),
                                count * spec.row_bytes, extent))
    return found


def _extent(reader, spec: Field, shards: list[int]) -> tuple[float, float, float]:
    def one(_: int, rows: dict[str, np.ndarray]) -> tuple[float, float, float, int]:
        decoded = spec.decode(rows[spec.name])
        return float(decoded.min()), float(decoded.max()), float(decoded.sum(dtype=np.float64)), decoded.size

    filled = [s for s in shards if reader.schema.counts[s]]
    lows, highs, sums, sizes = zip(*map_shards(reader, [spec.name], one, filled), strict=True)
    return min(lows), sum(sums) / sum(sizes), max(highs)
