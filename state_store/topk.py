"""Top-k fields: per row, the ids and values of k tracked columns out of L.

`topk_fields` declares the two fields of one top-k table. An id of UNTRACKED marks an empty place; its value is never
read. Ids of a row are distinct.
"""

from __future__ import annotations

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
