"""Copies of what a snapshot consists of besides its chunks, kept with the checkpoint, and mending a store from them.

One damaged or missing file of the store's metadata then costs nothing: the schema is there twice, a snapshot's log
entry and manifest are also in the checkpoint that it belongs to, histograms can be counted anew.
"""

from __future__ import annotations

import hashlib
import json

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import DAMAGED
from lacuna.basics.json_text import parse_json
from lacuna.state_store.log import SNAPSHOT
from lacuna.state_store.manifest import Manifest, manifest_url, read_manifest
from lacuna.state_store.schema import mend_schema
from lacuna.state_store.store import StateStore


def snapshot_copy(store: StateStore, name: str) -> bytes:
    """A committed snapshot's log entry and manifest in one; whoever keeps it keeps a checksum of it, too."""
    entry = store.entry(name)
    text = storage.read_bytes(manifest_url(store.url, entry.manifest)).decode()
    return json.dumps({"name": name, "manifest": entry.manifest, "sha256": entry.sha256, "meta": entry.meta,
                       "text": text}).encode()


def mend_snapshot(store: StateStore, copy: bytes, launch: int) -> list[str]:
    """Bring back the entry and the manifest of a snapshot from its copy, where they are not whole; what was mended."""
    try:
        body = parse_json(copy)
        name, token, sha256, text = (str(body[key]) for key in ("name", "manifest", "sha256", "text"))
        meta = dict(body["meta"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the copy of a snapshot is damaged ({type(error).__name__}: {error}).") from None
    if hashlib.sha256(text.encode()).hexdigest() != sha256:
        raise UserError(f"the copy of snapshot {name!r} is damaged: its manifest does not fit its checksum.")
    mended, url = [], manifest_url(store.url, token)
    Manifest.from_bytes(text.encode(), url)  # names that lead out of the store are refused
    try:
        read_manifest(store.url, token, sha256)
    except UserError:
        storage.write_atomic(url, text.encode())
        mended.append(f"manifest of snapshot {name}")
    known = {entry.name: entry for entry in store.snapshots()}
    if name not in known or known[name].manifest != token:
        def current(entries) -> int:
            store.fence.check(launch, entries)
            return launch

        store.fence.append(SNAPSHOT, current, name, manifest=token, sha256=sha256, meta=meta)
        mended.append(f"log entry of snapshot {name}")
    return mended


def mend_metadata(store: StateStore) -> list[str]:
    """Schema and Zarr metadata written anew where they are not as they were; what was mended."""
    return mend_schema(store.url, store.schema)


def drop_damaged(store: StateStore, launch: int) -> list[str]:
    """After all snapshots that have a copy are mended: remove unreadable log entries, and snapshots without a manifest.

    Nobody could use them, and as long as they are there nothing that they may need is tidied up.
    """
    store.fence.check(launch)
    dropped, numbers = [], [entry.number for entry in store.fence.entries() if entry.kind == DAMAGED]
    dropped += [f"unreadable log entry {number:08d}.json" for number in numbers]
    for entry in store.snapshots():
        try:
            read_manifest(store.url, entry.manifest, entry.sha256)
        except UserError as error:
            if isinstance(error, OSError):
                raise  # of the storage
            numbers.append(entry.number)
            dropped.append(f"snapshot {entry.name}: {error}")
    if numbers:
        store.fence.remove(numbers, launch)
    return dropped
