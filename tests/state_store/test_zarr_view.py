"""Proves that a snapshot's live Zarr group conforms to zarr's store tests and shows what the snapshot holds."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest
import xarray
import zarr
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.testing.store import StoreTests

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.state_store import Constant, Draw, Field
from lacuna.state_store.chunks import chunk_url
from lacuna.state_store.copies import zarr_copy
from lacuna.state_store.zarr_view import ReadOnlyStore, SnapshotObjects, open_group
from tests.helpers.state.samples import COUNTS, FIELDS, INITIALS, check_zarr

# zarr's tests of reading that put their objects into the store through `set`: here they are put there behind its back.
_READING = {"test_exists", "test_list", "test_list_prefix", "test_list_empty_path", "test_list_dir",
            "test_getsize_prefix", "test_serializable_store"}
_REFUSED = "store was opened in read-only mode and does not support writing"


async def _behind(store: ReadOnlyStore, key: str, value: Buffer) -> None:
    store.objects[key] = value.to_bytes()  # type: ignore[index]


class TestConformance(StoreTests[ReadOnlyStore, cpu.Buffer]):
    store_cls = ReadOnlyStore
    buffer_cls = cpu.Buffer

    async def set(self, store: ReadOnlyStore, key: str, value: Buffer) -> None:
        await _behind(store, key, value)

    async def get(self, store: ReadOnlyStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(store.objects[key])

    @pytest.fixture
    def store_kwargs(self) -> dict[str, Any]:
        return {"objects": {}}

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any], request, monkeypatch) -> ReadOnlyStore:
        if request.node.originalname in _READING:
            monkeypatch.setattr(ReadOnlyStore, "set", _behind)
        store = ReadOnlyStore(**store_kwargs)
        store._is_open = True
        return store

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> ReadOnlyStore:
        return ReadOnlyStore(**store_kwargs)

    def test_store_repr(self, store):
        assert repr(store) == "ReadOnlyStore({})"

    def test_store_supports_writes(self, store):
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store):
        assert store.supports_listing

    def test_store_read_only(self, store):
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False

    @pytest.mark.parametrize("read_only", [True, False])
    async def test_store_open_read_only(self, open_kwargs, read_only):
        if not read_only:
            with pytest.raises(ValueError, match="cannot be written to"):
                await ReadOnlyStore.open(**open_kwargs, read_only=False)
            return
        store = await ReadOnlyStore.open(**open_kwargs, read_only=True)
        assert store._is_open
        assert store.read_only

    # Writing, in zarr's own words: refused, and nothing has changed.

    async def refuses(self, store, action) -> None:
        before = dict(store.objects)
        with pytest.raises(ValueError, match=_REFUSED):
            await action
        assert store.objects == before

    @pytest.mark.parametrize("key", ["zarr.json", "c/0"])
    async def test_set(self, store, key):
        await self.refuses(store, store.set(key, self.buffer_cls.from_bytes(b"a")))

    async def test_set_not_open(self, store_not_open):
        await self.refuses(store_not_open, store_not_open.set("c/0", self.buffer_cls.from_bytes(b"a")))

    async def test_set_many(self, store):
        await self.refuses(store, store._set_many([("zarr.json", self.buffer_cls.from_bytes(b"a"))]))

    async def test_set_if_not_exists(self, store):
        await self.refuses(store, store.set_if_not_exists("k2", self.buffer_cls.from_bytes(b"a")))

    async def test_clear(self, store):
        await self.set(store, "key", self.buffer_cls.from_bytes(b"something"))
        with pytest.raises(NotImplementedError):
            await store.clear()
        assert not await store.is_empty("")


def test_the_group_shows_every_row_of_every_field(filled):
    store, state = filled
    group = open_group(store.reader("end", INITIALS), "end")
    assert sorted(group.array_keys()) == sorted(field.name for field in FIELDS)
    for field in FIELDS:
        assert group[field.name].shape == (len(COUNTS), max(COUNTS), *field.stored_shape)
    check_zarr(group, state)  # shards 4 and 5 were never written: initial values


def test_keys_and_bytes_are_those_of_the_plain_export(filled, tmp_path):
    """Chunks that were written are served as they lie in the store, bit for bit."""
    store, _ = filled
    reader = store.reader("end", INITIALS)
    objects = SnapshotObjects(reader, "end")
    plain = Path(tmp_path / "plain")
    zarr_copy(reader, str(plain))
    there = {str(path.relative_to(plain)): path.read_bytes() for path in plain.rglob("*") if path.is_file()}
    assert dict(objects) == there
    assert len(objects) == len(there)
    assert all(key in objects for key in there)
    for wrong in ("", "zarr", "phi", "phi/c/00/0/0", "phi/c/6/0/0", "phi/c/0/0", "phi/c/x/0/0", "nothing/zarr.json"):
        assert wrong not in objects
        assert ReadOnlyStore(objects).get_sync(wrong) is None
    raw = Path(chunk_url(store.url, "phi", 0, reader.refs["phi"][0].token)).read_bytes()
    assert objects["phi/c/0/0/0"] == raw


def test_nothing_is_read_before_it_is_used(filled, monkeypatch):
    """Opening and listing touch no chunk; one row touches one."""
    store, state = filled
    reader, asked = store.reader("end", INITIALS), []
    read = SnapshotObjects.__getitem__
    monkeypatch.setattr(SnapshotObjects, "__getitem__", lambda self, key: asked.append(key) or read(self, key))
    group = open_group(reader, "end")
    array = group["phi"]
    assert not [key for key in asked if "/c/" in key]
    np.testing.assert_array_equal(array[2, 5], state["phi"][2][5])
    assert [key for key in asked if "/c/" in key] == ["phi/c/2/0/0"]


def test_a_pickled_store_goes_on_elsewhere(filled):
    store, state = filled
    held = ReadOnlyStore(SnapshotObjects(store.reader("end", INITIALS), "end"))
    again = pickle.loads(pickle.dumps(held))
    assert again == held
    check_zarr(zarr.open_group(store=again, mode="r"), state)


def test_a_field_that_starts_from_labels_says_so_where_it_was_never_written(filled):
    store, state = filled
    group = open_group(store.reader("end"), "end")
    np.testing.assert_array_equal(group["ema"][0, : COUNTS[0]], state["ema"][0])
    with pytest.raises(UserError, match=r"'ema', shard 5 was never written.*open_run\(run\).state\(\)"):
        group["ema"][5]


def test_damage_is_an_error_not_a_fill_value(filled):
    store, _ = filled
    reader = store.reader("end", INITIALS)
    path = Path(chunk_url(store.url, "phi", 1, reader.refs["phi"][1].token))
    group, data = open_group(reader, "end"), path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(UserError, match="truncated"):
        group["phi"][1]
    path.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
    with pytest.raises(ValueError, match="checksum"):
        group["phi"][1]
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        group["phi"][1]


def test_a_snapshot_deleted_under_the_reader_is_said(tmp_path):
    store = state_store.create(str(tmp_path / "state"), [4], "index", [Field("a", (2,), "float32")], 0)
    launch = store.begin_launch()
    with store.session(launch, budget=10**6) as session:
        for name in ("one", "two"):
            session.lease(0)
            session.scatter("a", np.zeros(4, int), np.arange(4), np.full((4, 2), len(name) + ord(name[0]), np.float32))
            session.release(0)
            session.finish()
            session.snapshot(name, {})
        group = open_group(store.reader("one"), "one")
        store.delete_snapshot("one", launch)
    with pytest.raises(UserError, match=r"'one' was deleted while.*\['two'\] now"):
        group["a"][0]


def test_xarray_and_dask_open_it(tmp_path):
    """xarray names dimensions and turns codes into values; dask takes one chunk per shard."""
    counts = [5, 3]
    fields = [Field("score", (4,), "uint8", Constant(0.25), range=(0, 1)), Field("phi", (2, 3), "float16", Draw(-1, 1)),
              Field("step", (), "int32")]
    store = state_store.create(str(tmp_path / "state"), counts, "index", fields, 1)
    codes = np.arange(20, dtype=np.uint8).reshape(5, 4) * 12
    with store.session(store.begin_launch(), budget=10**6) as session:
        session.lease(0)
        session.scatter("score", np.zeros(5, int), np.arange(5), codes)
        session.release(0)
        session.finish()
        session.snapshot("end", {})
    reader = store.reader("end")
    group = open_group(reader, "end")
    lazy = dask.array.from_zarr(group["score"])
    assert lazy.chunks == ((1, 1), (5,), (4,))
    np.testing.assert_array_equal(lazy[0].compute(), codes)
    opened = xarray.open_zarr(group.store, consolidated=False)
    assert dict(opened.sizes) == {"shard": 2, "row": 5, "score_0": 4, "phi_0": 2, "phi_1": 3}
    np.testing.assert_allclose(opened["score"][0].compute(), fields[0].decode(codes), rtol=0, atol=1e-6)
    np.testing.assert_allclose(opened["score"][1, :3].compute(), 0.25, rtol=0, atol=1 / 500)  # never written
    np.testing.assert_array_equal(opened["phi"][1, :3].compute(), reader.read_shard("phi", 1))


def test_no_object_is_made_from_a_key_that_leads_out(filled):
    store, _ = filled
    held = ReadOnlyStore(SnapshotObjects(store.reader("end", INITIALS), "end"))
    for key in ("../state/zarr.json", "chunks/phi", "phi/c/../../zarr.json", "manifests"):
        assert held.get_sync(key, prototype=default_buffer_prototype()) is None
