"""Damaged or hostile metadata of a state store end in errors that say what is wrong, in time, inside its folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.state_store import Field
from lacuna.state_store.manifest import Manifest
from lacuna.state_store.schema import ATTRIBUTE, Schema
from lacuna.state_store.verify import verify
from tests.helpers.fuzzing import SHORT, damaged_bytes, damaged_json, fuzz_all

FIELD = Field("score", (4,), "uint8", range=(0, 1), histogram=True)


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path)


def make_store(tmp_path: Path) -> state_store.StateStore:
    made = state_store.create(str(tmp_path / "store"), [5, 3], "index", [FIELD])
    with made.session(made.begin_launch(), budget=1 << 20) as session:
        session.begin([0, 1], 0)
        for shard, count in ((0, 5), (1, 3)):
            session.lease(shard)
            session.scatter("score", np.full(count, shard), np.arange(count), np.full((count, 4), 7, np.uint8))
            session.release(shard)
        session.finish()
        session.snapshot("one")
    return made


def signed(data: bytes) -> bytes:
    """The same metadata with checksums that fit: damage has none, but a stranger can make them."""
    try:
        body = json.loads(data)
        if "entry" in body:
            return json.dumps({"entry": body["entry"], "sha256": hashlib.sha256(body["entry"].encode()).hexdigest()}
                              ).encode()
        schema = body["attributes"][ATTRIBUTE]
        del schema["sha256"]
        schema["sha256"] = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
        return json.dumps(body).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data


def targets(tmp_path: Path) -> dict:
    return targets_of(make_store(tmp_path))


def targets_of(store: state_store.StateStore) -> dict:
    root = Path(store.url)
    log, manifest = max((root / "log").iterdir()), next((root / "manifests").iterdir())
    chunk, counts = next((root / "chunks" / "score").iterdir()), next((root / "histograms").iterdir())

    def with_file(path: Path):
        good = path.read_bytes()

        def attempt(data: bytes) -> None:
            path.write_bytes(signed(data))
            try:
                again = state_store.open(store.url)
                verify(again)
                again.orphans()
                reader = again.reader("one")
                for shard in range(again.schema.shards):
                    reader.read_shard("score", shard)
            finally:
                path.write_bytes(good)
        return attempt

    return {
        "schema": (damaged_json((root / "zarr.json").read_bytes()), with_file(root / "zarr.json")),
        "unsigned schema": (damaged_json((root / "zarr.json").read_bytes()), lambda data: Schema.parse(data, "x")),
        "schema alone": (damaged_json((root / "zarr.json").read_bytes()), lambda data: Schema.parse(signed(data), "x")),
        "log": (damaged_json(log.read_bytes()), with_file(log)),
        "manifest": (damaged_json(manifest.read_bytes()), lambda data: Manifest.from_bytes(data, "x").objects()),
        "chunk": (damaged_bytes(chunk.read_bytes()), with_file(chunk)),
        "histogram": (damaged_bytes(counts.read_bytes()), with_file(counts)),
    }


ALLOWED = (UserError,)


def test_damaged_metadata(tmp_path):
    fuzz_all(targets(tmp_path), ALLOWED, SHORT // 2)


@pytest.mark.parametrize(("name", "before", "after", "message"), [
    ("schema", b'"name": "score"', b'"name": "core"', "no field 'score'; it has core"),
    ("schema alone", b'"range": [0.0, 1.0]', b'"range": [1.0]', "not enough values to unpack"),
    ("unsigned schema", b'"score"', b'"scare"', "its checksum does not fit"),
    ("log", b'manifest\\": \\"', b'manifest\\": \\"\\\\u0000', "no snapshot 'one'"),
    ("log", b'manifest\\": \\"', b'manifest\\": \\"../', "no snapshot 'one'")])
def test_damage_that_was_found_once(store, name, before, after, message):
    root = Path(store.url)
    good = (root / "zarr.json" if "schema" in name else max((root / "log").iterdir())).read_bytes()
    assert before in good
    with pytest.raises(UserError, match=message):
        targets_of(store)[name][1](good.replace(before, after))


def test_a_snapshot_of_fields_that_the_schema_lacks_is_a_problem(store):
    path = Path(store.url, "zarr.json")
    path.write_bytes(signed(path.read_bytes().replace(b'"name": "score"', b'"name": "core"')))
    found = [problem.text for problem in verify(state_store.open(store.url)).problems]
    assert "names field 'score', shard 0, which the store's schema does not have" in found


def test_a_manifest_cannot_name_files_outside_the_store(store):
    for token in ("../../x", "a/b", "", "0-0-0\n"):
        body = b'{"refs":{"score":{"0":["%s",1,2]}},"histograms":{}}' % token.encode().replace(b"\n", b"\\n")
        with pytest.raises(UserError, match="manifest"):
            Manifest.from_bytes(body, "x")
    shutil.rmtree(store.url)
