"""A rank's session on a store: leases in RAM while an epoch runs, deltas for snapshots, and roll-back.

The training thread calls; two I/O threads read ahead and write behind. One session a rank and launch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.state_store import chunks, faults, histograms
from lacuna.state_store.claims import Claim
from lacuna.state_store.counting import Counting
from lacuna.state_store.leases import Leases, io_threads_for
from lacuna.state_store.log import Snapshot
from lacuna.state_store.manifest import Delta, Manifest, Ref, Refs, check_deltas, merged, object_url, walk
from lacuna.state_store.store import Initials, StateStore


class Session(Leases):
    """Open with `Session(store, launch, rank, world, budget)`; `snapshot=None` starts from the initial values."""

    def __init__(self, store: StateStore, launch: int, rank: int = 0, world: int = 1, budget: int = 1 << 30,
                 snapshot: str | None = None, initials: Initials | None = None,
                 excluded: dict[str, histograms.Excluded] | None = None,
                 initial_counts: dict[str, np.ndarray] | None = None, threads: int | None = None):
        """`budget` bytes of RAM; `initials`: functions of the shard for fields with a Given rule; `excluded`: entries
        outside a field's histogram; `initial_counts`: histograms of the initial values where the caller knows them
        (from label counts), else constants are counted in closed form and others by one sweep."""
        self.store, self.launch, self.rank, self.world = store, launch, rank, world
        self.initials = dict(initials or {})
        self._counting = Counting(store, self.initials, dict(excluded or {}), dict(initial_counts or {}))
        store.fence.check(launch)
        self._count = itertools.count()
        self._base: Refs = {}  # versions that all ranks know
        self._written: Refs = {}  # versions of this rank since the last exchange
        self._handed: set[str] = set()  # tokens given away by prepare(): another may refer to them
        self._unsynced: set[str] = set()
        self._unnamed: set[tuple[str, str]] = set()  # rank 0: live objects that are in no manifest
        self._named: set[str] = set()  # rank 0: tokens of the last commit's deltas
        self._exchange_due = False
        super().__init__(store.schema, budget, threads or io_threads_for(store.url))
        try:
            self._claim = Claim(store.url, launch, rank, world)
        except BaseException:
            self._io.stop()
            raise
        try:
            self._set_base(snapshot)
        except BaseException:
            self.close()
            raise

    # ---- the step: leases, gather, scatter

    def begin(self, order: Sequence[int], epoch: int) -> None:
        """Announce the shards that this rank will lease, in opening order; reading ahead starts now."""
        for shard in order:
            self.schema.check_shard(shard)
        if len(set(order)) < len(order):
            raise UserError("the opening order names a shard twice: in one epoch every shard is opened once.")
        if self._exchange_due:
            raise UserError("an epoch ended without adopt(deltas): the other ranks' shards are not known here yet.")
        self.epoch = epoch
        self._claim.announce(frozenset(order))
        self._io.prefetch(order)

    def lease(self, shard: int) -> None:
        self.schema.check_shard(shard)
        if shard not in self._claim.shards:
            self._claim.announce(self._claim.shards | {shard})
        super().lease(shard)

    def gather(self, field: str, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self.at(shards, rows).gather(field)

    def scatter(self, field: str, shards: np.ndarray, rows: np.ndarray, stored: np.ndarray) -> None:
        self.at(shards, rows).scatter(field, stored)

    def finish(self) -> None:
        """End of the epoch: every lease must be released; waits for the write-back and gives up the claim."""
        leased = np.flatnonzero(self.slots.slot_of >= 0)
        if len(leased):
            raise UserError(f"shards {leased[:5].tolist()} are still leased: release them before the epoch ends.")
        self._io.forget()
        self._io.drain()
        self._exchange_due = self.world > 1
        self._claim.announce(frozenset())

    # ---- snapshots

    def prepare(self, durable: bool = True) -> Delta:
        """Write what is dirty (leases stay) and return this rank's delta. `durable=False`: for an exchange at the end
        of an epoch that is not committed."""
        self.spill()
        faults.point("prepare.spilled")
        if durable:
            storage.sync(sorted(self._unsynced))
            self._unsynced = set()
        faults.point("prepare.synced")
        self._handed |= {ref.token for _, _, ref in walk(self._written)}
        return Delta(self.launch, self.rank, self.world, durable,
                     {name: dict(shards) for name, shards in self._written.items()},
                     {name: counts.copy() for name, counts in self._counting.changes.items()})

    def commit(self, name: str, deltas: Sequence[Delta], meta: dict | None = None) -> Snapshot:
        """Rank 0: publish a snapshot from the deltas of all ranks. Afterwards every rank calls adopt(deltas)."""
        deltas = list(deltas)
        check_deltas(deltas, self.launch, self.world)
        if not all(delta.durable for delta in deltas):
            raise UserError("a delta of prepare(durable=False) cannot be committed: call prepare() on every rank.")
        refs = merged(self._base, deltas)
        entry = self.store.commit(name, refs, self._counting.merged(deltas), self.launch, meta)
        self._named = {ref.token for delta in deltas for _, _, ref in walk(delta.refs)}
        unused = self._unnamed - Manifest(refs).objects()
        storage.remove([object_url(self.store.url, *item) for item in sorted(unused)])
        self._unnamed = set()
        return entry

    def adopt(self, deltas: Sequence[Delta]) -> None:
        """Every rank, after each exchange: learn the versions that the others wrote."""
        deltas = list(deltas)
        check_deltas(deltas, self.launch, self.world)
        self._base, self._counting.counts = merged(self._base, deltas), self._counting.merged(deltas)
        if self.rank == 0:
            self._unnamed |= {("chunks/" + name, f"{shard:06d}.{ref.token}") for delta in deltas
                              for name, shard, ref in walk(delta.refs) if ref.token not in self._named}
        own = next(delta for delta in deltas if delta.rank == self.rank)
        with self._io.changed:  # training may have gone on since prepare(): what is newer stays this rank's own
            for name, shard, ref in walk(own.refs):
                if self._written.get(name, {}).get(shard) == ref:
                    del self._written[name][shard]
            for name, counts in own.histograms.items():
                self._counting.changes[name] = self._counting.changes[name] - counts
        self._handed, self._exchange_due = set(), False

    def snapshot(self, name: str, meta: dict | None = None) -> Snapshot:
        """prepare + commit + adopt, for a single process."""
        deltas = [self.prepare()]
        entry = self.commit(name, deltas, meta)
        self.adopt(deltas)
        return entry

    def restore(self, name: str | None) -> None:
        """Roll back to a snapshot (None: initial values). Every rank calls it; leases must be released."""
        self.finish()
        self._discard_written()
        self._set_base(name)
        self._exchange_due = False

    def collect(self, keep: Sequence[str]) -> None:
        """Rank 0: delete all snapshots but these, and what only they used."""
        self._unnamed |= self.store.collect(keep, self.launch, live=self._base)

    def delete_snapshot(self, name: str) -> None:
        self._unnamed |= self.store.delete_snapshot(name, self.launch, live=self._base)

    # ---- reading outside leases, histograms

    def read_shard(self, field: str, shard: int) -> np.ndarray:
        """Stored rows of one shard as last written (not of a leased shard); for sweeps over all samples."""
        if self.slots.slot_of[shard] >= 0:
            raise UserError(f"shard {shard} is leased: sweeps over all rows run between epochs, after finish().")
        if shard in self._io.records:  # its write-back may be under way
            self._io.drain()
        return self.store.read(self._version(self.slots.known(field), shard), field, shard, self.initials)

    def histogram(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """(counts of the last exchange, this rank's changes since), int64 [columns, 256] each. The caller sums the
        changes over ranks; exact when no shard is leased."""
        self._io.drain()
        if field not in self._counting.counts:
            raise UserError(f"field {self.slots.known(field)!r} keeps no histogram: declare it with histogram=True.")
        return self._counting.counts[field].copy(), self._counting.changes[field].copy()

    # ---- life

    def close(self) -> None:
        """Stop the threads and drop what was not committed; safe to call twice and in an exception."""
        if not self._io.stopping:
            self._io.stop()
            with contextlib.suppress(Exception):  # tidiness only: the next launch removes what is left
                self._discard_written()
                self._claim.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _set_base(self, snapshot: str | None) -> None:
        manifest = Manifest({}) if snapshot is None else self.store.manifest(snapshot)
        self._base, self._written, self._handed = manifest.refs, {}, set()
        self._counting.reset(manifest)

    def _version(self, field: str, shard: int) -> Ref | None:
        """The newest object of a chunk; None if it was never written."""
        return self._written.get(field, {}).get(shard) or self._base.get(field, {}).get(shard)

    def _discard_written(self) -> None:
        """Remove this rank's objects that nobody else can know of."""
        gone = [chunks.chunk_url(self.store.url, name, shard, ref.token)
                for name, shard, ref in walk(self._written) if ref.token not in self._handed]
        storage.remove(gone)
        self._unsynced -= set(gone)
        self._written = {}

    # ---- in the I/O threads

    def _load(self, field: str, shard: int, slot: int) -> None:
        spec, count, out = self.schema.fields[field], int(self.schema.counts[shard]), self.slots.slabs[field][slot]
        ref = self._version(field, shard)
        if ref is None:
            out[:count] = spec.initial_rows(self.schema.seed, shard, count, self.initials.get(field))
            out[count:] = 0
        else:
            chunks.read_into(self.store.url, spec, shard, ref, out)
        if spec.histogram:
            self.slots.before[field][slot] = out
        with self._io.changed:
            self.metrics.chunks_read += ref is not None
            self.metrics.bytes_read += ref.size if ref is not None else 0

    def _store(self, field: str, shard: int, slot: int) -> None:
        spec, data = self.schema.fields[field], self.slots.slabs[field][slot]
        token = f"{self.launch}-{self.rank}-{next(self._count)}"
        moved = self._counting.moved(field, shard, self.slots.before[field][slot], data) if spec.histogram else None
        ref = chunks.write(self.store.url, spec, shard, token, data)
        with self._io.changed:
            old = self._written.setdefault(field, {}).get(shard)
            self._written[field][shard] = ref
            self._unsynced.add(chunks.chunk_url(self.store.url, field, shard, token))
            if moved is not None:
                self._counting.changes[field] += moved
            self.metrics.chunks_written += 1
            self.metrics.bytes_written += ref.size
            if old is None or old.token in self._handed:
                return
            superseded = chunks.chunk_url(self.store.url, field, shard, old.token)
            self._unsynced.discard(superseded)
        storage.remove([superseded])
