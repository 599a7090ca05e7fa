"""Exact top-p per column without holding the matrix: which rows have the p_i highest scores of column i.

A cut-off is (score code, tie key): an entry is chosen if its code is higher, or equal with a tie key that is not above
the bound. Tie keys are hashes of (seed, field, salt, sample, column), distinct within a column, so exactly p_i are
chosen. The histogram gives the bin; a streaming sweep collects the tied entries. If ties are too many to hold (most
scores are 0 after all), sweeps narrow them by histograms of the next byte first, in bounded memory.
Legend: B rows, L columns; a candidate is an entry that the cut-off falls between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.state_store.histograms import BINS, Excluded
from lacuna.state_store.row_hash import tag_key, tie_keys
from lacuna.state_store.sweep import Alone, Exchange, Reader, map_shards

_ALL = np.uint64(2**64 - 1)
_NONE = 1 << 32  # above every code


@dataclass(frozen=True, eq=False)
class Cutoffs:
    codes: np.ndarray  # int64 [L]
    bounds: np.ndarray  # uint64 [L], inclusive
    tie_key: int  # names the hash that breaks ties
    max_rows: int  # of the longest shard: sample number = shard · max_rows + row

    def selected(self, codes: np.ndarray, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """bool [B, L]: whether each entry of a batch (stored codes [B, L]) is among its column's top p."""
        theta = np.minimum(self.codes, np.iinfo(np.int32).max).astype(np.int32)
        chosen = codes > theta
        tied = codes == theta
        chosen |= tied & (self.bounds == _ALL)
        tied &= self.bounds != _ALL
        at, columns = np.nonzero(tied)
        if len(at):
            samples = np.asarray(shards)[at].astype(np.int64) * self.max_rows + np.asarray(rows)[at]
            chosen[at, columns] = tie_keys(np.uint64(self.tie_key), samples, columns) <= self.bounds[columns]
        return chosen

    def to_arrays(self) -> dict[str, np.ndarray]:
        """For the checkpoint: after a resume in the middle of an epoch cut-offs are not recomputed."""
        return {"codes": self.codes, "bounds": self.bounds, "rule": np.array([self.tie_key, self.max_rows], np.uint64)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Cutoffs:
        key, max_rows = (int(x) for x in arrays["rule"])
        return cls(arrays["codes"], arrays["bounds"], key, max_rows)


@dataclass
class _Search:
    """Per column: the range of (code, tie key) that still holds the cut-off, and how many of it are to be chosen."""

    quota: np.ndarray  # int64 [L], of the candidates
    size: np.ndarray  # int64 [L], candidates; 0 once the column is settled
    codes: np.ndarray  # int64 [L]: known high bits of the code
    keys: np.ndarray  # uint64 [L]: known high bits of the tie key
    code_left: int  # bits of the code not yet known
    key_left: int = 64

    @property
    def active(self) -> np.ndarray:
        return self.size > 0

    def narrow(self, counts: np.ndarray) -> None:
        """Use counts [L, 256] of the candidates' next byte, in order of preference."""
        before = np.cumsum(counts, axis=1) - counts
        column = np.arange(len(counts))
        # The first byte at which the cumulated count reaches the quota.
        byte = np.argmax((before + counts) >= self.quota[:, None], axis=1)
        active = self.active
        if self.code_left:
            self.code_left -= 8
            self.codes = np.where(active, self.codes * BINS + (BINS - 1 - byte), self.codes * BINS)
        else:
            self.key_left -= 8
            self.keys = np.where(active, (self.keys << np.uint64(8)) | byte.astype(np.uint64), self.keys)
        self.quota = np.where(active, self.quota - before[column, byte], self.quota)
        self.size = np.where(active, counts[column, byte], 0)

    def settle(self, codes: np.ndarray, bounds: np.ndarray) -> None:
        """Columns whose candidates are all chosen need no further look."""
        done = self.active & (self.quota == self.size)
        codes[done] = self.codes[done] << self.code_left
        if self.key_left == 64:
            bounds[done] = _ALL
        elif self.key_left:
            bounds[done] = ((self.keys[done] + np.uint64(1)) << np.uint64(self.key_left)) - np.uint64(1)
        else:
            bounds[done] = self.keys[done]
        self.size[done] = 0


def exact_cutoffs(reader: Reader, field: str, quotas: np.ndarray, counts: np.ndarray, salt: int,
                  excluded: Excluded | None = None, exchange: Exchange | None = None, rank: int = 0, world: int = 1,
                  limit: int = 8_000_000, threads: int = 2) -> Cutoffs:
    """Cut-offs that choose exactly quotas[i] entries of column i (all eligible ones if there are fewer).

    `counts` [L, 256] is the field's histogram summed over ranks; `salt` (the epoch) changes how ties fall; `excluded`
    entries are outside the ranking; each rank reads its part of the shards; `limit` candidates are held at most.
    """
    search, result = _start(reader, field, quotas, counts, salt)
    exchange = exchange or Alone()
    spec, codes, bounds = reader.schema.fields[field], result.codes, result.bounds
    mine = range(rank, reader.schema.shards, world)

    def tied(shard: int, rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _candidates(search, rows[field], shard, result, excluded)

    def next_bytes(shard: int, rows: dict[str, np.ndarray]) -> np.ndarray:
        columns, level, keys = tied(shard, rows)
        if search.code_left:
            byte = BINS - 1 - ((level >> (search.code_left - 8)) & (BINS - 1))
        else:
            byte = ((keys >> np.uint64(search.key_left - 8)) & np.uint64(BINS - 1)).astype(np.int64)
        return np.bincount(columns * BINS + byte, minlength=spec.columns * BINS).reshape(spec.columns, BINS)

    search.settle(codes, bounds)
    while search.active.any() and int(search.size.sum()) > limit:
        total = np.zeros((spec.columns, BINS), np.int64)
        for part in map_shards(reader, [field], next_bytes, mine, threads):
            total += part
        search.narrow(exchange.sum(total))
        search.settle(codes, bounds)
    if search.active.any():
        parts = list(map_shards(reader, [field], tied, mine, threads))
        found = [np.concatenate([part[i] for part in parts]) if parts else np.zeros(0, np.int64) for i in range(3)]
        columns, level, keys = (np.concatenate(exchange.gather(part)) for part in found)
        _choose(search, columns, level, keys.astype(np.uint64), codes, bounds)
    return result


def _start(reader: Reader, field: str, quotas: np.ndarray, counts: np.ndarray, salt: int) -> tuple[_Search, Cutoffs]:
    spec = reader.schema.fields[field]
    if not spec.histogram:
        raise UserError(f"field {field!r} keeps no histogram: declare it with histogram=True.")
    quotas = np.asarray(quotas, dtype=np.int64)
    if quotas.shape != (spec.columns,) or counts.shape != (spec.columns, BINS):
        raise UserError(f"field {field!r}: quotas {quotas.shape} and counts {counts.shape} given, expected "
                        f"({spec.columns},) and ({spec.columns}, {BINS}).")
    eligible = counts.sum(axis=1)
    quotas = np.clip(quotas, 0, eligible)
    key = tag_key(reader.schema.seed, "ties/" + field, salt)
    result = Cutoffs(np.full(spec.columns, _NONE, np.int64), np.full(spec.columns, _ALL), int(key),
                     reader.schema.max_rows)
    result.codes[(quotas == eligible) & (quotas > 0)] = 0
    undecided = (quotas > 0) & (quotas < eligible)
    search = _Search(quotas, np.where(undecided, eligible, 0), np.zeros(spec.columns, np.int64),
                     np.zeros(spec.columns, np.uint64), 8 * spec.stored_dtype.itemsize)
    search.narrow(counts[:, ::-1])
    return search, result


def _candidates(search: _Search, stored: np.ndarray, shard: int, result: Cutoffs,
                excluded: Excluded | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns, codes, tie keys) of a shard's entries that lie in the searched range."""
    known = stored >> np.asarray(search.code_left, stored.dtype) if search.code_left else stored
    inside = (known == search.codes.astype(stored.dtype)) & search.active
    if excluded is not None:
        inside[excluded(shard)] = False
    rows, columns = np.nonzero(inside)
    keys = tie_keys(np.uint64(result.tie_key), shard * result.max_rows + rows, columns)
    codes = stored[rows, columns].astype(np.int64)
    if search.key_left < 64:
        fits = (keys >> np.uint64(search.key_left)) == search.keys[columns]
        columns, codes, keys = columns[fits], codes[fits], keys[fits]
    return columns.astype(np.int64), codes, keys


def _choose(search: _Search, columns: np.ndarray, level: np.ndarray, keys: np.ndarray, codes: np.ndarray,
            bounds: np.ndarray) -> None:
    """Sort the candidates of each column by (code down, tie key up); the quota-th is the cut-off."""
    order = np.lexsort((keys, -level, columns))
    columns, level, keys = columns[order], level[order], keys[order]
    active = np.flatnonzero(search.active)
    last = np.searchsorted(columns, active) + search.quota[active] - 1
    assert (columns[last] == active).all(), "the histogram does not fit the rows"
    codes[active], bounds[active] = level[last], keys[last]
