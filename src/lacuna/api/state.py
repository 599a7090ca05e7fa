"""Per-sample state that training left behind: by shard as arrays, as a table, and as a live Zarr group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lacuna import state_store
from lacuna.api.tables import pandas_module
from lacuna.basics.errors import UserError
from lacuna.state_store.fields import Field
from lacuna.state_store.store import Initials, StateStore

if TYPE_CHECKING:
    import pandas
    import zarr

__all__ = ["StateReader", "open_state"]


class StateReader:
    """One snapshot of a state store; `open_state` and `RunReader.state` make it."""

    def __init__(self, store: StateStore, snapshot: str | None = None, initials: Initials | None = None,
                 classes: Sequence[str] = ()):
        self._store, self._classes = store, list(classes)
        names = self.snapshots
        if not names:
            raise UserError(f"{store.url}: no snapshot was ever committed, so there is nothing to read. Training "
                            "commits one with every checkpoint (train.checkpoint_every).")
        self.snapshot = store.entry(snapshot).name if snapshot else names[-1]
        self._reader = store.reader(self.snapshot, initials)

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def snapshots(self) -> list[str]:
        """Names of the snapshots that the store holds now, oldest first."""
        return [entry.name for entry in self._store.snapshots()]

    @property
    def fields(self) -> dict[str, Field]:
        """name → what is kept about every sample: `.shape`, `.dtype`, `.range`, `.initial`."""
        return dict(self._store.schema.fields)

    @property
    def counts(self) -> np.ndarray:
        """int64 [shards]: rows of every shard."""
        return self._store.schema.counts.copy()

    def read(self, field: str, shard: int, stored: bool = False) -> np.ndarray:
        """A shard's values [rows, *shape]: floats, booleans or integers; with `stored`, the codes as they lie there."""
        self._store.schema.check_shard(shard)
        codes = self._reader.read_shard(field, shard)
        return codes if stored else self.fields[field].decode(codes)

    def frame(self, field: str, shards: Sequence[int] | None = None) -> pandas.DataFrame:
        """One line per sample, indexed by (shard, row); one column per class (or number) of the field."""
        pd = pandas_module()
        chosen = range(len(self.counts)) if shards is None else shards
        spec = self.fields.get(field)
        if spec is not None and len(spec.shape) > 1:
            raise UserError(f"field {field!r} holds arrays of shape {spec.shape} per sample, a table has two "
                            f"dimensions: use read({field!r}, shard) or zarr()[{field!r}].")
        parts = [self.read(field, shard) for shard in chosen]
        values = np.concatenate([part.reshape(len(part), -1) for part in parts])
        places = [(shard, row) for shard, part in zip(chosen, parts, strict=True) for row in range(len(part))]
        columns: list[Any] = list(range(values.shape[1])) if spec is not None and spec.shape else [field]
        if len(self._classes) == len(columns):
            columns = self._classes
        return pd.DataFrame(values, pd.MultiIndex.from_tuples(places, names=["shard", "row"]), columns)

    def zarr(self) -> zarr.Group:
        """The snapshot as a Zarr group that reads chunks when they are used; nothing is copied.

            group = state.zarr()
            group["score"][3, :10]                                   # stored codes of shard 3
            xarray.open_zarr(group.store, consolidated=False)        # values, lazily, with dask
            dask.array.from_zarr(group["score"])

        Field `f` is an array (shards, rows of the longest shard, *shape); rows beyond a shard's own have no meaning
        (`rows` tells how many there are). Booleans are packed, eight per byte.
        """
        from lacuna.state_store.zarr_view import open_group  # zarr takes a while to import

        return open_group(self._reader, self.snapshot)

    def __repr__(self) -> str:
        return f"StateReader({self.url!r}, snapshot={self.snapshot!r}, fields={list(self.fields)})"


def open_state(url: str, snapshot: str | None = None) -> StateReader:
    """The per-sample state of a run, or of any state store, at a snapshot (default: the newest).

        state = lacuna.open_state("runs/my-run/state")
        state.snapshots                  # ["step-00000100", "step-00000200"]
        state.read("score", shard=0)     # float32 [rows, classes]
        state.frame("score")             # pandas, one line per sample
        state.zarr()["score"]            # a lazy Zarr array (shards, rows, classes)

    `url`: a folder or any fsspec URL. Fields that start from labels need `lacuna.open_run(run).state()` where shards
    were never visited. Reading never changes the store, also while a run writes to it.
    """
    return StateReader(state_store.open(url), snapshot)
