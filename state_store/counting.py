"""A session's histograms: counts that all ranks agreed on at the last exchange, and this rank's changes since."""

from __future__ import annotations

import logging

import numpy as np

from lacuna.state_store import histograms
from lacuna.state_store.manifest import DamagedHistogram, Delta, Manifest, read_histogram
from lacuna.state_store.store import Initials, SnapshotReader, StateStore
from lacuna.state_store.sweep import map_shards

log = logging.getLogger("lacuna")


class Counting:
    """`known` are histograms of initial values that the caller has (from label counts)."""

    def __init__(self, store: StateStore, initials: Initials, excluded: dict[str, histograms.Excluded],
                 known: dict[str, np.ndarray]):
        self.store, self.initials, self.excluded, self.known = store, initials, excluded, known
        self.counts: dict[str, np.ndarray] = {}  # field → int64 [columns, 256]
        self.changes: dict[str, np.ndarray] = {}

    def reset(self, manifest: Manifest) -> None:
        """Start from a snapshot's histograms, or from those of the initial values."""
        for field in self.store.schema.fields.values():
            if field.histogram:
                counts = self._starting_counts(field.name, manifest)
                self.counts[field.name], self.changes[field.name] = counts, np.zeros_like(counts)

    def _starting_counts(self, name: str, manifest: Manifest) -> np.ndarray:
        schema, outside = self.store.schema, self.excluded.get(name)
        field = schema.fields[name]
        if name in manifest.histograms:
            try:
                return read_histogram(self.store.url, name, manifest.histograms[name])
            except DamagedHistogram as error:
                log.warning("%s; counting its values anew", error)
        if name in manifest.histograms or manifest.refs.get(name):  # or resharded, or migrated: counted once, here
            reader = SnapshotReader(self.store, manifest.refs, self.initials)
            parts = map_shards(reader, [name], lambda shard, rows: histograms.counts(
                rows[name], outside(shard) if outside else None))
            return sum(parts, np.zeros((field.columns, histograms.BINS), np.int64))
        if name in self.known:
            return np.array(self.known[name], np.int64)
        return histograms.initial_counts(field, schema.seed, schema.counts, self.initials.get(name), outside)

    def merged(self, deltas: list[Delta]) -> dict[str, np.ndarray]:
        return {name: counts + sum(delta.histograms[name] for delta in deltas) for name, counts in self.counts.items()}

    def moved(self, field: str, shard: int, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """How a chunk's write-back changes the counts; `before` becomes `after`."""
        count = int(self.store.schema.counts[shard])
        outside = self.excluded[field](shard) if field in self.excluded else None
        change = histograms.change(before[:count], after[:count], outside)
        before[:] = after
        return change
