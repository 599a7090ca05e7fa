"""A batch's rows in the leased shards: located once, then gathered and scattered field by field."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lacuna.state_store.fields import Field
from lacuna.state_store.schema import Schema
from lacuna.state_store.slots import Slots


class Holder(Protocol):
    """The session that the rows are leased by."""

    schema: Schema
    slots: Slots
    epoch: int


class Rows:
    """Samples (shards[b], rows[b]); valid until the first of their shards is released."""

    def __init__(self, session: Holder, shards: np.ndarray, rows: np.ndarray):
        self._session, self._slots, self.shards, self.rows = session, session.slots, shards, rows
        self._index, self._slot = self._slots.locate(shards, rows)

    def narrow(self, start: int, stop: int) -> Rows:
        """Those from `start` to `stop`."""
        return Rows(self._session, self.shards[start:stop], self.rows[start:stop])

    def gather(self, field: str, out: np.ndarray | None = None) -> np.ndarray:
        """Stored values [B, *stored_shape], a copy; into `out` (a pinned buffer's view) if given, which is faster."""
        return self._slots.gather(field, self._index, out)

    def scatter(self, field: str, stored: np.ndarray) -> None:
        """Replace stored values; the shards are written back when they are released."""
        self._slots.scatter(field, self._index, self._slot, stored)

    def read(self, field: str) -> np.ndarray:
        """Values [B, *shape] as floats (quantised, float16), booleans (bits) or integers."""
        return self.decode(field, self.gather(field))

    def decode(self, field: str, stored: np.ndarray) -> np.ndarray:
        return self.field(field).decode(stored)

    def write(self, field: str, values: np.ndarray) -> None:
        """Round values to the stored type (stochastically if the field says so) and scatter them."""
        spec = self.field(field)
        self.scatter(field, spec.encode(values, self.rounding_keys(spec)))

    def field(self, name: str) -> Field:
        return self._session.schema.fields[self._slots.known(name)]

    def rounding_keys(self, field: Field) -> np.ndarray | None:
        """uint64 [B] if the field rounds stochastically."""
        if not field.stochastic:
            return None
        return field.rounding_keys(self._session.schema.seed, self._session.epoch, self.shards, self.rows)
