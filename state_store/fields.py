"""Fields: what is remembered about every sample, how it is stored, and how stored numbers map to floats.

Kinds, by the stored dtype and `range`:
    plain       float32, float16, any integer: stored as they are
    quantised   uint8 or uint16 with `range=(low, high)`: codes 0..max spread over the range
    bits        dtype "bits": booleans, eight to a stored byte
Legend: B rows, `shape` is one row's shape.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.state_store import rounding
from lacuna.state_store.row_hash import row_keys, tag_key, uniform

DTYPES = ("float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bits")
COMPRESSIONS = ("lz4", "zstd", "none")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}$")


@dataclass(frozen=True)
class Constant:
    """Every entry starts at this value."""

    value: float = 0.0


@dataclass(frozen=True)
class Draw:
    """Entries start uniform in [low, high), a hash of (seed, field, shard, row, column)."""

    low: float
    high: float


@dataclass(frozen=True)
class Given:
    """Rows start at what a function of the shard says (the trainer knows the labels; the store does not).

    The session is opened with the function; `name` goes into the schema, so that a store made with one rule is not
    continued with another.
    """

    name: str = "labels"


Initial = Constant | Draw | Given


@dataclass(frozen=True)
class Field:
    name: str
    shape: tuple[int, ...]
    dtype: str
    initial: Initial = Constant()
    range: tuple[float, float] | None = None
    stochastic: bool = False
    """Round stochastically (quantised and float16 fields): without it small steps of a running average are lost."""
    compression: str | None = None
    """None picks lz4 for integers and none for floats: float state hardly compresses (×1.1 for twice the CPU)."""
    histogram: bool = False
    """Keep a 256-bin histogram per column (one-dimensional quantised fields): what top-p cut-offs start from."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if self.compression is None:
            object.__setattr__(self, "compression", "none" if self.dtype.startswith("float") else "lz4")
        if self.range is not None:
            low, high = self.range
            object.__setattr__(self, "range", (float(low), float(high)))
        problem = self._problem()
        if problem:
            raise UserError(f"field {self.name!r}: {problem}")

    def _problem(self) -> str | None:
        if not _NAME.match(self.name):
            return "a field's name is a lower-case letter followed by letters, digits and '_'."
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r}; legal: {', '.join(DTYPES)}."
        if self.compression not in COMPRESSIONS:
            return f"compression {self.compression!r}; legal: {', '.join(COMPRESSIONS)}."
        if any(n < 1 for n in self.shape):
            return f"shape {self.shape}: every size must be ≥ 1."
        if self.range is not None and (self.dtype not in ("uint8", "uint16") or not self.range[0] < self.range[1]):
            return f"range {self.range} with dtype {self.dtype}: a range (low < high) needs dtype uint8 or uint16."
        if self.stochastic and self.range is None and self.dtype != "float16":
            return f"stochastic rounding needs dtype float16, or uint8/uint16 with a range; found {self.dtype}."
        if self.histogram and (self.range is None or len(self.shape) != 1):
            return "a histogram needs a one-dimensional quantised field: dtype uint8 or uint16 with a range."
        if self.dtype == "bits" and len(self.shape) != 1:
            return f"shape {self.shape}: a field of bits has one dimension."
        return None

    @cached_property
    def stored_dtype(self) -> np.dtype:
        return np.dtype("uint8" if self.dtype == "bits" else self.dtype)

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        return ((self.shape[0] + 7) // 8,) if self.dtype == "bits" else self.shape

    @cached_property
    def columns(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Stored rows → float32 (quantised, float16), bool (bits), or the stored numbers themselves."""
        if self.dtype == "bits":
            return np.unpackbits(stored, axis=-1, count=self.shape[0]).view(np.bool_)
        if self.range is not None:
            return rounding.from_codes(stored, *self.range)
        return stored.astype(np.float32) if self.dtype == "float16" else stored

    def encode(self, values: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
        """Values [B, *shape] → stored rows; `keys` (from `rounding_keys`) are needed to round stochastically.

        A number that the field cannot hold (NaN, infinity in a quantised field) is refused: it would become a
        plausible wrong code.
        """
        values = np.asarray(values)
        if values.shape[1:] != self.shape:
            raise UserError(f"field {self.name!r}: rows of shape {values.shape[1:]} given, it holds {self.shape}.")
        if self.dtype == "bits":
            return np.packbits(values.astype(bool, copy=False), axis=-1)
        if self.range is not None or (self.stochastic and keys is not None):
            self._check_finite(values)
            flat = values.reshape(len(values), self.columns)
            if self.range is not None:
                codes = rounding.to_codes(flat, *self.range, self.stored_dtype, keys if self.stochastic else None)
            else:
                assert keys is not None
                codes = rounding.to_half(flat, keys)
            return codes.reshape(values.shape)
        return values.astype(self.stored_dtype, copy=False)

    def _check_finite(self, values: np.ndarray) -> None:
        if not np.isfinite(values).all():
            self.check_finite(np.isfinite(values).reshape(len(values), -1).all(axis=1))

    def check_finite(self, finite: np.ndarray) -> None:
        """Refuse rows of which `finite` (bool [B]) says that they are not."""
        if not finite.all():
            bad = int(np.flatnonzero(~finite)[0])
            raise UserError(f"field {self.name!r}: row {bad} of the batch has a NaN or infinity, which {self.dtype} "
                            "cannot hold. Look for a diverged loss; the last snapshot is intact.")

    def rounding_keys(self, seed: int, epoch: int, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return row_keys(tag_key(seed, "round/" + self.name, epoch), shards, rows)

    def initial_rows(self, seed: int, shard: int, count: int, given=None) -> np.ndarray:
        """Stored initial rows [count, *stored_shape] of one shard; `given(shard)` serves fields with a Given rule."""
        if isinstance(self.initial, Constant):
            return np.broadcast_to(self.initial_code(), (count, *self.stored_shape))
        if isinstance(self.initial, Draw):
            spread = uniform(seed, "initial/" + self.name, shard, np.arange(count), self.columns)
            spread *= np.float32(self.initial.high - self.initial.low)
            spread += np.float32(self.initial.low)
            return self._nearest(spread.reshape(count, *self.shape))
        if given is None:
            raise UserError(f"field {self.name!r}, shard {shard} was never written, and it starts from a function "
                            f"({self.initial.name!r}) of the shard: pass initials={{{self.name!r}: function}}, or open "
                            "the state with lacuna.open_run(run).state(), which knows it.")
        values = np.asarray(given(shard))
        if values.shape == (count, *self.stored_shape) and values.dtype == self.stored_dtype:
            return values
        if values.shape != (count, *self.shape):
            raise UserError(f"field {self.name!r}: the initial function gave shape {values.shape} for shard {shard}, "
                            f"expected {(count, *self.shape)}.")
        return self._nearest(values)

    def initial_code(self) -> np.ndarray:
        """The stored row of a constant initial value."""
        assert isinstance(self.initial, Constant)
        kind = bool if self.dtype == "bits" else np.float64
        return self._nearest(np.full((1, *self.shape), self.initial.value, kind))[0]

    def _nearest(self, values: np.ndarray) -> np.ndarray:
        if self.range is None and self.stored_dtype.kind in "iu" and self.dtype != "bits":
            values = np.rint(values)
        return self.encode(values)

    def to_json(self) -> dict:
        return {
            "name": self.name, "shape": list(self.shape), "dtype": self.dtype,
            "initial": {"kind": type(self.initial).__name__.lower(), **vars(self.initial)},
            "range": list(self.range) if self.range else None, "stochastic": self.stochastic,
            "compression": self.compression, "histogram": self.histogram,
        }

    @classmethod
    def from_json(cls, body: dict) -> Field:
        initial = dict(body["initial"])
        kinds: dict[str, type] = {"constant": Constant, "draw": Draw, "given": Given}
        return cls(
            name=body["name"], shape=tuple(body["shape"]), dtype=body["dtype"],
            initial=kinds[initial.pop("kind")](**initial), range=tuple(body["range"]) if body["range"] else None,
            stochastic=body["stochastic"], compression=body["compression"], histogram=body["histogram"],
        )
