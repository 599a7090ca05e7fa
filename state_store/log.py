"""The store's log: its fence, in which every committed snapshot is an entry."""

from __future__ import annotations

from dataclasses import dataclass, field

from lacuna.basics import storage
from lacuna.basics.fence import Entry, Fence

SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Snapshot:
    number: int  # of the log entry
    launch: int
    name: str
    manifest: str = ""  # token of the manifest object
    sha256: str = ""  # of its bytes
    created: float = 0.0
    meta: dict = field(default_factory=dict)


def fence_of(store: str) -> Fence:
    return Fence(storage.join(store, "log"))


def snapshots_in(entries: list[Entry]) -> list[Snapshot]:
    """All that were committed, oldest first; a name may occur again (a relaunch made it anew)."""
    return [found for entry in entries if entry.kind == SNAPSHOT and (found := _snapshot(entry)) is not None]


def _snapshot(entry: Entry) -> Snapshot | None:
    manifest, meta = str(entry.body.get("manifest", "")), entry.body.get("meta")
    if not manifest.isprintable() or "/" in manifest:
        return None  # names no manifest of this store
    return Snapshot(entry.number, entry.launch, entry.name, manifest, str(entry.body.get("sha256", "")), entry.created,
                    meta if isinstance(meta, dict) else {})
