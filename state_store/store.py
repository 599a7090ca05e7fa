"""The state store on disk or object storage: launches, snapshots, commit, and collection of what is no longer used.

Nothing here is on the hot path; sessions (session.py) do the reading and writing of shards.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import DAMAGED, Entry, newest_launch
from lacuna.state_store import faults
from lacuna.state_store.chunks import Ref, read_into
from lacuna.state_store.fields import Field
from lacuna.state_store.log import SNAPSHOT, Snapshot, fence_of, snapshots_in
from lacuna.state_store.manifest import (
    Manifest,
    Refs,
    manifest_url,
    object_url,
    read_manifest,
    write_histogram,
    write_manifest,
)
from lacuna.state_store.schema import Schema, is_store, read_schema, write_schema, written_metadata

if TYPE_CHECKING:
    from lacuna.state_store.session import Session

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
# Objects that this program wrote: foreign files are left alone (`verify` names them).
_OURS = re.compile(r"^(\d{6,}\.\d+-\d+-\d+|[a-z]\w*\.\d+-[0-9a-f]{12}|\d+-[0-9a-f]{12}\.json"
                   r"|.*\.[0-9a-f]{8}\.partial)$")
_REMOVE_BATCH = 500
Initials = dict[str, Callable[[int], np.ndarray]]  # field → function(shard) → rows, for fields with a Given rule


class StateStore:
    def __init__(self, url: str, schema: Schema):
        self.url, self.schema, self.fence = url.rstrip("/"), schema, fence_of(url)

    # ---- snapshots

    def snapshots(self) -> list[Snapshot]:
        """Committed snapshots, oldest first; of two with one name (a relaunch made it again) the newer counts."""
        by_name = {entry.name: entry for entry in snapshots_in(self.fence.entries())}
        return sorted(by_name.values(), key=lambda entry: entry.number)

    def entry(self, name: str) -> Snapshot:
        for entry in self.snapshots():
            if entry.name == name:
                return entry
        names = [entry.name for entry in self.snapshots()]
        raise UserError(f"{self.url}: no snapshot {name!r}; there are {names or 'none'}.")

    def manifest(self, name: str) -> Manifest:
        entry = self.entry(name)
        return read_manifest(self.url, entry.manifest, entry.sha256)

    def commit(self, name: str, refs: Refs, histograms: dict[str, np.ndarray], launch: int,
               meta: dict | None = None) -> Snapshot:
        """Publish a snapshot: all its chunks are durable already; creating the log entry is the commit."""
        if not _NAME.match(name):
            raise UserError(f"snapshot name {name!r}: use letters, digits, '.', '_' and '-'.")
        self._check_may_commit(self.fence.entries(), name, launch)
        faults.point("commit.before_manifest")
        token = f"{launch}-{uuid.uuid4().hex[:12]}"
        stored = {field: write_histogram(self.url, field, token, counts) for field, counts in histograms.items()}
        sha256 = write_manifest(self.url, token, Manifest(refs, stored))
        faults.point("commit.manifest")

        try:
            entry = self.fence.append(SNAPSHOT, lambda entries: self._check_may_commit(entries, name, launch), name,
                                      manifest=token, sha256=sha256, meta=meta or {})
        except UserError:
            storage.remove([manifest_url(self.url, token), *_histogram_urls(self.url, stored)])
            raise
        faults.point("commit.entry")
        return snapshots_in([entry])[0]

    def _check_may_commit(self, entries: list[Entry], name: str, launch: int) -> int:
        self.fence.check(launch, entries)
        if any(e.kind == SNAPSHOT and e.name == name and e.launch == launch for e in entries):
            raise UserError(f"snapshot {name!r} exists: snapshots are immutable. Choose another name, or delete it.")
        return launch

    def collect(self, keep: Sequence[str], launch: int, live: Refs | None = None) -> set[tuple[str, str]]:
        """Delete all snapshots but `keep`, and the objects that only they named; returns those spared for `live`.

        Only objects named by a deleted manifest are candidates: what other ranks are writing now is in no manifest, so
        it cannot be touched. `live` are the versions a running session works on; they stay.
        """
        self.fence.check(launch)
        kept = {self.entry(name).number for name in keep}
        doomed = [e for e in snapshots_in(self.fence.entries()) if e.number not in kept]
        if not doomed:
            return set()
        needed: set[tuple[str, str]] = set()
        for name in keep:
            needed |= self.manifest(name).objects()
        unused: set[tuple[str, str]] = set()
        for entry in doomed:
            # A damaged manifest can be deleted too; the next launch removes what it named.
            with contextlib.suppress(UserError):
                unused |= read_manifest(self.url, entry.manifest, entry.sha256).objects()
        unused -= needed
        spared = unused & Manifest(live or {}).objects()
        unused -= spared
        # The entry goes first: a snapshot that can be named is always whole.
        self.fence.remove([entry.number for entry in doomed], launch)
        faults.point("collect.entry_removed")
        self._remove(sorted(unused), "collect.some_removed")
        storage.remove([manifest_url(self.url, entry.manifest) for entry in doomed])
        faults.point("collect.removed")
        return spared

    def delete_snapshot(self, name: str, launch: int, live: Refs | None = None) -> set[tuple[str, str]]:
        doomed = self.entry(name)
        return self.collect([e.name for e in self.snapshots() if e.number != doomed.number], launch, live)

    # ---- launches

    def begin_launch(self) -> int:
        """Take over the store for a new launch (rank 0; the others are told the number) and remove what died with older
        ones. From here on an older launch that still runs can neither publish nor delete."""
        faults.point("launch.before_entry")
        launch = self.fence.begin()
        faults.point("launch.entry")
        self.remove_orphans()
        return launch

    def remove_orphans(self) -> int:
        """Delete objects that no snapshot names. Only at the start of a launch, when no rank is writing."""
        try:
            orphans = self.orphans()
        except UserError:
            return 0  # a damaged manifest hides which objects it needs: nothing is safe to delete until it is mended
        self._remove(orphans, "orphans.some_removed")
        return len(orphans)

    def orphans(self) -> list[tuple[str, str]]:
        needed: set[tuple[str, str]] = set()
        for entry in self.snapshots():
            needed |= read_manifest(self.url, entry.manifest, entry.sha256).objects()
            needed.add(("manifests", entry.manifest + ".json"))
        newest = newest_launch(self.fence.entries())
        found: set[tuple[str, str]] = set()
        if any(entry.kind == DAMAGED for entry in self.fence.entries()):
            raise UserError(f"{self.fence.url}: a damaged entry hides which objects are needed.")
        for kind in [*(f"chunks/{field}" for field in self.schema.fields), "histograms", "manifests"]:
            found |= {(kind, name) for name in storage.list_names(storage.join(self.url, kind)) if _OURS.search(name)}
        found |= {("claims", name) for name in storage.list_names(storage.join(self.url, "claims"))
                  if not name.startswith(f"{newest}-")}
        found |= {("log", name) for name in storage.list_names(storage.join(self.url, "log"))
                  if name.endswith(".partial")}
        return sorted(found - needed)

    def _remove(self, objects: list[tuple[str, str]], fault: str) -> None:
        for start in range(0, len(objects), _REMOVE_BATCH):
            batch = objects[start : start + _REMOVE_BATCH]
            half = len(batch) // 2  # so that a kill can land between two deletions even of a few objects
            storage.remove([object_url(self.url, *item) for item in batch[:half]])
            faults.point(fault)
            storage.remove([object_url(self.url, *item) for item in batch[half:]])

    def session(self, launch: int, rank: int = 0, world: int = 1, **options) -> Session:
        """A rank's session (session.py has the options: budget, snapshot, initials, excluded, threads)."""
        from lacuna.state_store.session import Session  # it builds on this module

        return Session(self, launch, rank, world, **options)

    # ---- reading committed state

    def reader(self, name: str, initials: Initials | None = None) -> SnapshotReader:
        """Read-only view of a snapshot, for sweeps over all rows."""
        return SnapshotReader(self, self.manifest(name).refs, initials)

    def read(self, ref: Ref | None, field: str, shard: int, initials: Initials | None = None) -> np.ndarray:
        """Stored rows [rows of the shard, *stored_shape] of one version; None: never written, so initial values."""
        spec, count = self.schema.fields[field], int(self.schema.counts[shard])
        if ref is None:
            return np.array(spec.initial_rows(self.schema.seed, shard, count, (initials or {}).get(field)))
        out = np.empty((self.schema.max_rows, *spec.stored_shape), spec.stored_dtype)
        read_into(self.url, spec, shard, ref, out)
        return out[:count]


class SnapshotReader:
    """What sweeps over all rows need (the session offers it too): the schema and a shard's stored rows."""

    def __init__(self, store: StateStore, refs: Refs, initials: Initials | None = None):
        self.store, self.schema, self.refs, self.initials = store, store.schema, refs, initials

    def read_shard(self, field: str, shard: int) -> np.ndarray:
        if field not in self.schema.fields:
            raise UserError(f"{self.store.url}: no field {field!r}; it has {', '.join(self.schema.fields)}.")
        return self.store.read(self.refs.get(field, {}).get(shard), field, shard, self.initials)


def create(url: str, counts: Sequence[int] | np.ndarray, fingerprint: str, fields: Sequence[Field],
           seed: int = 0) -> StateStore:
    """A new store: metadata only, whatever the number of samples; chunks appear when they are first written."""
    schema = Schema.of(counts, fingerprint, fields, seed)
    write_schema(url, schema)
    return StateStore(url, schema)


def prepare(url: str, counts: Sequence[int] | np.ndarray, fingerprint: str, fields: Sequence[Field], seed: int,
            worthless: int | None = None) -> None:
    """At the start of a launch: create the store if there is none, and remove what died with older launches.

    One in which nothing was ever committed is made anew if it does not fit: a launch with other settings left it. So
    is one with snapshots that belong to nothing, where `worthless` is the number of the launch that says so.
    """
    if is_store(url):
        store = StateStore(url, read_schema(url))
        fits = not store.schema.differences(Schema.of(counts, fingerprint, fields, seed))
        if fits or (store.snapshots() and worthless is None):
            store.remove_orphans()
            return
        if worthless is not None:
            store.collect([], worthless)
        storage.remove([storage.join(url, name) for name in written_metadata(store.schema)])
    create(url, counts, fingerprint, fields, seed).remove_orphans()


def open(url: str, counts: Sequence[int] | np.ndarray | None = None, fingerprint: str | None = None,
         fields: Sequence[Field] | None = None, seed: int | None = None) -> StateStore:
    """Open a store; whatever is passed besides the URL must be what the store was created with."""
    schema = read_schema(url)
    asked = Schema.of(schema.counts if counts is None else counts,
                      schema.fingerprint if fingerprint is None else fingerprint,
                      list(schema.fields.values()) if fields is None else fields, schema.seed if seed is None else seed)
    differences = schema.differences(asked)
    if differences:
        raise UserError(f"{url} does not fit what is asked:\n  " + "\n  ".join(differences) + "\nContinue with the old "
                        "settings, choose another store URL, or convert it (`lacuna state migrate`).")
    return StateStore(url, schema)


def _histogram_urls(store: str, stored: dict) -> list[str]:
    return [object_url(store, "histograms", f"{field}.{ref.token}") for field, ref in stored.items()]
