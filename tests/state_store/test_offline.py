"""Proves that exports are readable elsewhere and come back exact, and that resharding and migration move every row."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.state_store import Field
from lacuna.state_store.copies import import_rows, reference_copy, row_copies, zarr_copy
from lacuna.state_store.reshard import migrate, reshard
from tests.helpers.state.samples import COUNTS, FIELDS, INITIALS, SEED, assert_same, check_zarr, copied


def keys(shard: int) -> list[str]:
    return [f"sample-{shard}-{row}" for row in range(COUNTS[shard])]


def test_plain_zarr_is_read_by_zarr(filled, tmp_path):
    """zarr.open sees every row of every field, never-written ones with their initial values."""
    import zarr

    store, state = filled
    assert zarr_copy(store.reader("end", INITIALS), str(tmp_path / "z")) == len(FIELDS) * len(COUNTS)
    check_zarr(zarr.open(str(tmp_path / "z"), mode="r"), state)
    with pytest.raises(UserError, match="already a Zarr group"):
        zarr_copy(store.reader("end", INITIALS), str(tmp_path / "z"))
    with pytest.raises(UserError, match="initials"):
        zarr_copy(store.reader("end"), str(tmp_path / "y"))


@pytest.mark.skipif(importlib.util.find_spec("tensorstore") is None, reason="tensorstore is not installed")
def test_plain_zarr_is_read_by_tensorstore(filled, tmp_path):
    """TensorStore reads the same export."""
    import tensorstore

    store, state = filled
    zarr_copy(store.reader("end", INITIALS), str(tmp_path / "z"))
    group = {name: tensorstore.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/z/{name}/"}).result().read().result()
             for name in state}
    check_zarr(group, state)


def test_references_are_read_in_place(filled, tmp_path):
    """A reference manifest lets zarr read the live store's chunks without a copy."""
    import fsspec
    import zarr
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from zarr.storage import FsspecStore

    store, state = filled
    reference_copy(store.reader("end", INITIALS), str(tmp_path / "refs.json"))
    references = fsspec.filesystem("reference", fo=str(tmp_path / "refs.json"), remote_protocol="file",
                                   skip_instance_cache=True)
    wrapped = AsyncFileSystemWrapper(references, asynchronous=True)
    check_zarr(zarr.open(FsspecStore(wrapped, read_only=True, path=""), mode="r"), state)


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_rows_round_trip_by_key(filled, tmp_path, kind):
    """Exported rows come back bit-exact into a store that lost them, in one or many passes."""
    store, state = filled
    out = str(tmp_path / "rows")
    assert row_copies(store.reader("end", INITIALS), keys, out, kind) == sum(COUNTS)
    other = state_store.create(str(tmp_path / "other"), COUNTS, "index", FIELDS, SEED)
    assert import_rows(other, None, out, keys, "back", budget=4000, initials=INITIALS) == (sum(COUNTS), 0)
    with other.session(other.begin_launch(), budget=10**6, initials=INITIALS, snapshot="back") as session:
        assert_same(session, state)
    with pytest.raises(UserError, match=r"format 'csv'.*parquet"):
        row_copies(store.reader("end", INITIALS), keys, out, "csv")
    with pytest.raises(UserError, match=r"no \.parquet or \.npz"):
        import_rows(other, None, str(tmp_path), keys, "x")


def test_partial_import_keeps_the_rest(filled, tmp_path):
    """Files with some fields replace only those; the snapshot before stays as it was."""
    store, state = filled
    out = str(tmp_path / "rows")
    row_copies(store.reader("end", INITIALS), keys, out, "npz", ["step", "phi"])
    before = copied(state)
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS, snapshot="end") as session:
        session.lease(2)
        for name in ("step", "moment"):
            session.scatter(name, np.full(12, 2), np.arange(12), np.zeros_like(state[name][2]))
        session.release(2)
        session.finish()
        session.snapshot("changed")
    state["moment"][2][:] = 0
    import_rows(store, "changed", out, keys, "mended", initials=INITIALS)
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS, snapshot="mended") as session:
        assert_same(session, state)
        session.restore("end")
        assert_same(session, before)


def test_reshard_moves_state_by_key(filled, tmp_path):
    """Samples dealt to other shards, some dropped and some new, keep their rows; new ones start afresh."""
    store, state = filled
    everything = [key for shard in range(len(COUNTS)) for key in keys(shard)]
    where = {key: (s, r) for s in range(len(COUNTS)) for r, key in enumerate(keys(s))}
    order = np.random.default_rng(1).permutation(len(everything))[:-3]
    shuffled = [*(everything[i] for i in order), "new-1", "new-2"]
    counts = [17, 16, len(shuffled) - 33]
    dealt = [shuffled[:17], shuffled[17:33], shuffled[33:]]

    def fresh(shard: int) -> np.ndarray:
        return np.full((counts[shard], 8), 0.25, np.float32)

    target, moved, dropped = reshard(store, "end", keys, str(tmp_path / "new"), counts, "index-2", dealt.__getitem__,
                                     budget=3000, initials=INITIALS, target_initials={"ema": fresh})
    assert (moved, dropped) == (len(everything) - 3, 3)
    assert target.entry("end").meta == {"step": 7}
    with target.session(target.begin_launch(), budget=10**6, initials={"ema": fresh}, snapshot="end") as session:
        for shard, names in enumerate(dealt):
            for field in FIELDS:
                got = session.read_shard(field.name, shard)
                start = field.initial_rows(SEED, shard, counts[shard], fresh)
                for row, key in enumerate(names):
                    expected = state[field.name][where[key][0]][where[key][1]] if key in where else start[row]
                    np.testing.assert_array_equal(got[row], expected)
        assert int(sum(session.histogram("ema")).sum()) == sum(counts) * 8
    with pytest.raises(UserError, match=r"'ema', shard \d+.*only training knows"):
        reshard(store, "end", keys, str(tmp_path / "third"), counts, "index-2", dealt.__getitem__)
    with pytest.raises(UserError, match=r"'sample-0-0' occurs twice"):
        reshard(store, "end", keys, str(tmp_path / "fourth"), [2], "i", lambda s: ["sample-0-0", "sample-0-0"])


def test_migrate_converts_fields(filled, tmp_path):
    """A wider dtype keeps the values, dropped fields stay behind, new ones start afresh; other shapes are refused."""
    store, state = filled
    fields = [Field("ema", (8,), "uint16", state_store.Given("third"), range=(0, 1), histogram=True),
              Field("phi", (8,), "float32"), FIELDS[3], Field("more", (2,), "int8", state_store.Constant(3))]
    target, done = migrate(store, "end", str(tmp_path / "new"), fields)
    assert any("uint8 → uint16" in line for line in done)
    assert any(line == "heat: left behind" for line in done)
    reader = target.reader("end", INITIALS)
    for shard in range(4):
        scores = fields[0].decode(reader.read_shard("ema", shard))
        np.testing.assert_allclose(scores, state["ema"][shard] / 255, atol=1e-5)
        np.testing.assert_array_equal(reader.read_shard("phi", shard), state["phi"][shard].astype(np.float32))
        np.testing.assert_array_equal(reader.read_shard("ids", shard), state["ids"][shard])
    assert (reader.read_shard("more", 1) == 3).all()
    whole, _ = migrate(store, "end", str(tmp_path / "whole"), [Field("phi", (8,), "int16")])
    for shard in range(4):  # to the nearest whole number, halves to the even one
        np.testing.assert_array_equal(whole.reader("end", INITIALS).read_shard("phi", shard),
                                      np.rint(state["phi"][shard].astype(np.float64)))
    with pytest.raises(UserError, match=r"shape \(8,\).*\(9,\)"):
        migrate(store, "end", str(tmp_path / "bad"), [Field("phi", (9,), "float32")])


def test_live_store_has_zarr_metadata(filled):
    """zarr opens the store itself: shapes, dtypes and the schema in its attributes."""
    import zarr

    store, _ = filled
    group = zarr.open(store.url, mode="r")
    assert group["heat"].shape == (len(COUNTS), 12, 3, 4, 4)
    assert group["phi"].dtype == np.float16
    assert group["phi"].chunks == (1, 12, 8)
    assert json.loads(json.dumps(group.attrs["lacuna_state"]))["fingerprint"] == "index"
