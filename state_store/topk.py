"""Top-k fields: per row, the ids and values of k tracked columns out of L, with a dense view of a batch.

`topk_fields` declares the two fields of one top-k table. An id of UNTRACKED marks an empty place; its value is never
read. Ids of a row are distinct. Legend: B rows, k places, L columns, G further dimensions of a value (heatmaps).
"""

from __future__ import annotations

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.state_store.fields import Constant, Field

UNTRACKED = -1


def topk_fields(name: str, k: int, columns: int, dtype: str, shape: tuple[int, ...] = (), initial: float = 0.0,
                range: tuple[float, float] | None = None, stochastic: bool = False) -> tuple[Field, Field]:
    """(<name>_ids, <name>_values): int16 or int32 ids [k] and values [k, *shape]."""
    if not 1 <= k <= columns:
        raise UserError(f"top-k field {name!r}: k = {k}, legal: 1..{columns}.")
    ids = Field(name + "_ids", (k,), "int16" if columns <= 2**15 else "int32", Constant(UNTRACKED))
    return ids, Field(name + "_values", (k, *shape), dtype, Constant(initial), range=range, stochastic=stochastic)


def dense(ids: np.ndarray, values: np.ndarray, columns: int, untracked: float = 0.0) -> np.ndarray:
    """[B, L, *G]: tracked values in their columns, `untracked` everywhere else."""
    out = np.full((len(ids), columns, *values.shape[2:]), untracked, values.dtype)
    row, place = np.nonzero(ids != UNTRACKED)
    out[row, ids[row, place]] = values[row, place]
    return out


def lookup(ids: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """int64 [B, q]: the place of each asked column [B, q] in its row, UNTRACKED if it has none."""
    hit = ids[:, None, :] == columns[:, :, None]
    return np.where(hit.any(axis=2), hit.argmax(axis=2), UNTRACKED)


def track(ids: np.ndarray, values: np.ndarray, columns: np.ndarray, scores: np.ndarray,
          forced: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Offer candidate columns [B, q] with scores [B, q]; returns new (ids, values) [B, k].

    A tracked column takes its new score; then the k highest of tracked and offered stay, so the minimum is evicted.
    Columns of `forced` (bool [B, q]: the annotated classes) are never evicted. Equal scores: the one already tracked
    stays, then the lower column. An offered id of UNTRACKED is no offer.
    """
    places = ids.shape[1]
    known = lookup(ids, columns)
    row, offer = np.nonzero((known != UNTRACKED) & (columns != UNTRACKED))
    values = values.astype(np.float32, copy=True)
    values[row, known[row, offer]] = scores[row, offer]
    fresh = (known == UNTRACKED) & (columns != UNTRACKED)
    all_ids = np.concatenate([ids.astype(np.int64), np.where(fresh, columns, UNTRACKED)], axis=1)
    all_values = np.concatenate([values, scores.astype(np.float32)], axis=1)
    rank = np.where(all_ids == UNTRACKED, -np.inf, all_values)
    if forced is not None:
        pinned = np.zeros(all_ids.shape, bool)
        pinned[:, places:] = forced & fresh
        row, offer = np.nonzero(forced & (known != UNTRACKED))
        pinned[row, known[row, offer]] = True
        most = int(pinned.sum(axis=1).max(initial=0))
        if most > places:
            raise UserError(f"{most} columns of a row are forced into {places} tracked places: raise k.")
        rank = np.where(pinned, np.inf, rank)
    newcomer = np.zeros(all_ids.shape, np.int8)
    newcomer[:, places:] = 1
    best = np.lexsort((all_ids, newcomer, -rank), axis=1)[:, :places]
    best.sort(axis=1)  # those that stay keep their places' order
    chosen = np.take_along_axis(all_ids, best, axis=1)
    return chosen.astype(ids.dtype), np.take_along_axis(all_values, best, axis=1)
