"""Collects scores batch by batch on every rank and ranks them exactly, without any rank holding all N × L scores.

Every rank owns a range of classes. Block by block, ranks send each other the columns (dense scores) or the annotated
entries (mostly unknown targets) of the classes they own; the per-class results are then gathered, so all ranks return
the same numbers: those of one process, bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.trainer.metrics.blocks import Batch, class_blocks, columns, join_stats, rank_batches
from lacuna.trainer.metrics.exchange import Peers
from lacuna.trainer.metrics.measures import RankingResult, checked_batch
from lacuna.trainer.metrics.ranking import ClassStats, ordered_keys, rank_columns, rank_entries

# One annotated entry. `row` counts this collector's rows; on the way to the owner of the class it becomes the ordinal.
ENTRY = np.dtype([("cls", np.int32), ("key", np.uint32), ("row", np.int64), ("positive", np.bool_)])
_DENSE_BYTES = 5  # a float32 score and an int8 target
# Scores are kept in blocks of about this size: from 4 MiB on, which their targets reach too, numpy asks for huge pages,
# and a copy into those costs a third of one into as many new small pages.
_BLOCK_BYTES = 16 << 20


class ScoreCollector:
    """Feed it every batch of an evaluation, then ask for the `result`; every rank must do both."""

    def __init__(self, classes: int):
        self.classes = classes
        self.count = 0
        self.sparse: bool | None = None  # chosen at the first batch with rows: whichever takes less memory
        self._dense: list[Batch] = []  # blocks of rows
        self._room: Batch  # the last block with the room behind its rows
        self._entries: list[np.ndarray] = []
        self._ordinals: list[np.ndarray] = []
        self._row_positives: list[np.ndarray] = []

    def add(self, scores, targets, keep=None, ordinals=None) -> None:
        """Copy scores float32/float16 [B, L] and targets int8 [B, L] (arrays or tensors).

        keep: bool [B], False for padding. ordinals: int64 [B], a number per sample that does not depend on the world
        size; it decides only how the map_asl variant orders tied scores. Without it, rows count rank by rank.
        """
        scores, targets = checked_batch(scores, targets)
        if scores.shape[1] != self.classes:
            raise ValueError(f"scores have {scores.shape[1]} classes, this collector was made for {self.classes}.")
        chosen = slice(None) if keep is None else np.flatnonzero(np.asarray(keep))
        scores, targets = scores[chosen], targets[chosen]
        if not len(scores):
            return
        if (ordinals is None) != (not self._ordinals) and self.count:
            raise ValueError("ordinals must be given with every batch or with none.")
        if ordinals is not None:
            self._ordinals.append(np.array(ordinals, dtype=np.int64)[chosen])
        if self.sparse is None:
            annotated = int(np.count_nonzero(targets != UNKNOWN))
            self.sparse = annotated * ENTRY.itemsize < targets.size * _DENSE_BYTES
        if self.sparse:
            entries = _entries_of(scores, targets, self.count)
            self._entries.append(entries)
            positives = np.bincount(entries["row"][entries["positive"]] - self.count, minlength=len(scores))
        else:
            self._keep(scores, targets)
            positives = (targets == POSITIVE).view(np.uint8).sum(axis=1, dtype=np.uint32).astype(np.int64)
        self._row_positives.append(positives)
        self.count += len(scores)

    def _keep(self, scores: np.ndarray, targets: np.ndarray) -> None:
        """Copy them (the caller may use its buffers again) behind the rows of the last block or into a new one."""
        filled = len(self._dense[-1][0]) if self._dense else 0
        stop = filled + len(scores)
        if self._dense and self._room[0].dtype == scores.dtype and stop <= len(self._room[0]):
            self._dense.pop()
        else:
            rows = max(len(scores), _BLOCK_BYTES // (scores.itemsize * self.classes))
            self._room = np.empty((rows, self.classes), scores.dtype), np.empty((rows, self.classes), np.int8)
            filled, stop = 0, len(scores)
        self._room[0][filled:stop], self._room[1][filled:stop] = scores, targets
        self._dense.append((self._room[0][:stop], self._room[1][:stop]))

    def row_positives(self) -> np.ndarray:
        """int64 [rows]: positives of every collected row, to choose `rows` for a result (ReaL's k = 1, 2, 3, ≥ 4)."""
        return np.concatenate(self._row_positives) if self._row_positives else np.zeros(0, np.int64)

    def result(self, group: dist.ProcessGroup | None = None, rows: np.ndarray | None = None,
               ungrouped: bool = True) -> RankingResult:
        """Exact results over all ranks' rows, or over those where `rows` (bool [rows] of this rank) is true."""
        peers = Peers(group)
        local = self if rows is None else self._restricted(np.asarray(rows, bool))
        facts = np.stack(peers.gather(np.array(
            [local.count, local.classes, bool(local._dense), bool(local._entries), bool(local._ordinals)], np.int64)))
        counts = facts[:, 0]
        if len(set(facts[:, 1].tolist())) > 1:
            raise ValueError(f"ranks collect different numbers of classes: {facts[:, 1].tolist()}.")
        if len(set(facts[counts > 0, 4].tolist())) > 1:
            raise ValueError("some ranks were given ordinals and some were not.")
        ordinals = np.concatenate(local._ordinals) if local._ordinals else (
            np.arange(local.count) + int(counts[: peers.rank].sum()))
        if facts[:, 3].any():
            stats = local._by_entries(peers, ordinals, ungrouped)
        elif peers.world == 1:
            stats = rank_batches(local._dense, ordinals, self.classes, ungrouped)
        else:
            stats = local._by_columns(peers, counts, ordinals, ungrouped)
        return RankingResult(int(counts.sum()), stats)

    def _restricted(self, chosen: np.ndarray) -> ScoreCollector:
        """A collector with some of the rows."""
        if len(chosen) != self.count:
            raise ValueError(f"rows has {len(chosen)} entries, this rank collected {self.count} rows.")
        part = ScoreCollector(self.classes)
        part.count, part.sparse = int(chosen.sum()), self.sparse
        if self._ordinals:
            part._ordinals = [np.concatenate(self._ordinals)[chosen]]
        start = 0
        for scores, targets in self._dense:
            mask = chosen[start : start + len(scores)]
            part._dense.append((scores[mask], targets[mask]))
            start += len(scores)
        number = np.cumsum(chosen) - 1
        for entries in self._entries:
            kept = entries[chosen[entries["row"]]]
            kept["row"] = number[kept["row"]]
            part._entries.append(kept)
        return part

    def _by_columns(self, peers: Peers, counts: np.ndarray, ordinals: np.ndarray, ungrouped: bool) -> ClassStats:
        everyone = np.concatenate(peers.gather(ordinals))
        plans = [class_blocks(*_owned(self.classes, owner, peers.world)) for owner in range(peers.world)]
        mine = []
        # Owners may differ by one block: all take part in as many rounds as the longest plan has.
        for turn in range(max(len(plan) for plan in plans)):
            blocks = [plan[turn] if turn < len(plan) else (0, 0) for plan in plans]
            turned = [columns(self._dense, low, high) for low, high in blocks]
            height = blocks[peers.rank][1] - blocks[peers.rank][0]
            keys = _side_by_side(peers.swap([k for k, _ in turned]), height, counts)
            targets = _side_by_side(peers.swap([t for _, t in turned]), height, counts)
            if height:
                mine.append(rank_columns(keys, targets, everyone, ungrouped))
        return _gather_stats(peers, join_stats(mine))

    def _by_entries(self, peers: Peers, ordinals: np.ndarray, ungrouped: bool) -> ClassStats:
        entries = np.concatenate([*self._entries, *self._dense_entries()] or [np.zeros(0, ENTRY)])
        entries["row"] = ordinals[entries["row"]]
        owned = [_owned(self.classes, owner, peers.world) for owner in range(peers.world)]
        if peers.world > 1:
            parts = [entries[(entries["cls"] >= low) & (entries["cls"] < high)] for low, high in owned]
            entries = np.concatenate(peers.swap(parts))
        low, high = owned[peers.rank]
        stats = rank_entries(entries["cls"] - low, entries["key"], entries["positive"], entries["row"], high - low)
        if not ungrouped:
            stats.ap_ungrouped[:] = np.nan
        return _gather_stats(peers, stats)

    def _dense_entries(self) -> list[np.ndarray]:
        """This rank's dense batches as entries: only when another rank chose the other storage."""
        starts = np.cumsum([0, *(len(scores) for scores, _ in self._dense)])
        return [_entries_of(s, t, int(a)) for (s, t), a in zip(self._dense, starts[:-1], strict=True)]


def _entries_of(scores: np.ndarray, targets: np.ndarray, first_row: int) -> np.ndarray:
    # flatnonzero on a flat view scans bytes eight at a time; nonzero on a matrix does not.
    flat = np.flatnonzero(targets.reshape(-1) != UNKNOWN)
    out = np.empty(len(flat), ENTRY)
    rows, out["cls"] = np.divmod(flat, targets.shape[1])
    out["row"] = rows + first_row
    out["key"] = ordered_keys(scores.reshape(-1)[flat])
    out["positive"] = targets.reshape(-1)[flat] == POSITIVE
    return out


def _owned(classes: int, owner: int, world: int) -> tuple[int, int]:
    return classes * owner // world, classes * (owner + 1) // world


def _side_by_side(pieces: list[np.ndarray], height: int, counts: np.ndarray) -> np.ndarray:
    return np.concatenate([p.reshape(height, int(n)) for p, n in zip(pieces, counts, strict=True)], axis=1)


def _gather_stats(peers: Peers, mine: ClassStats) -> ClassStats:
    if peers.world == 1:
        return mine
    return join_stats([ClassStats.from_matrix(m.reshape(6, -1)) for m in peers.gather(mine.to_matrix())])
