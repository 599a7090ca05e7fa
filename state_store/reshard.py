"""New stores from old ones: `reshard` when the dataset was sharded anew, `migrate` when the fields change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.state_store.fields import Field
from lacuna.state_store.moving import BulkWriter, Keys, KeyTable, move_rows, stored_batches
from lacuna.state_store.store import Initials, SnapshotReader, StateStore, create


def reshard(source: StateStore, snapshot: str, source_keys: Keys, url: str, counts: Sequence[int] | np.ndarray,
            fingerprint: str, keys: Keys, budget: int = 1 << 30, initials: Initials | None = None,
            target_initials: Initials | None = None) -> tuple[StateStore, int, int]:
    """A new store over other shards of the same samples: each sample's state follows its key.

    Samples that are new start from their initial values; returns (store, samples moved, samples dropped).
    """
    target = create(url, counts, fingerprint, list(source.schema.fields.values()), source.schema.seed)
    reader = source.reader(snapshot, initials)
    table, writer = KeyTable(keys, target.schema.shards), BulkWriter(target)
    base = SnapshotReader(target, {}, target_initials)
    moved, dropped = move_rows(lambda: stored_batches(reader, source_keys, initials or {}), table, writer, base, budget)
    writer.commit(snapshot, source.entry(snapshot).meta)
    return target, moved, dropped


def migrate(source: StateStore, snapshot: str, url: str, fields: Sequence[Field]) -> tuple[StateStore, list[str]]:
    """A new store over the same shards with other fields; returns it and what was done, field by field.

    Equal fields are copied, fields that changed their dtype, range or rounding are converted through floats, new ones
    start from their initial values, and those not asked for are left behind.
    """
    target = create(url, source.schema.counts, source.schema.fingerprint, fields, source.schema.seed)
    reader, writer, done = source.reader(snapshot), BulkWriter(target), []
    for new in target.schema.fields.values():
        old = source.schema.fields.get(new.name)
        if old is None:
            done.append(f"{new.name}: new, starts from its initial values")
            continue
        if old.shape != new.shape:
            raise UserError(f"field {new.name!r}: shape {old.shape} in {source.url}, {new.shape} asked. Rows of "
                            "another shape cannot be converted; give the new field another name.")
        shards = sorted(reader.refs.get(new.name, {}))
        same = old.stored_dtype == new.stored_dtype and old.range == new.range
        for shard in shards:
            rows = reader.read_shard(new.name, shard)
            writer.write(new.name, shard, rows if same else _converted(old, new, rows))
        done.append(f"{new.name}: {'copied' if same else f'{old.dtype} → {new.dtype}'}, {len(shards)} chunks")
    done += [f"{name}: left behind" for name in source.schema.fields if name not in target.schema.fields]
    writer.commit(snapshot, source.entry(snapshot).meta)
    return target, done


def _converted(old: Field, new: Field, rows: np.ndarray) -> np.ndarray:
    values = old.decode(rows)
    if new.range is None and new.stored_dtype.kind in "iu" and new.dtype != "bits":
        values = np.rint(values)
    return new.encode(values)
