"""Damage to one file of a run, as disks and people do it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from lacuna import state_store
from lacuna.state_store.chunks import chunk_url

HARMS: dict[str, Callable[[bytes], bytes] | None] = {
    "truncated": lambda data: data[: len(data) // 2],
    "deleted": None,
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
}


def harm_something(folder: str, harm: str, at: float) -> str:
    """Harm a file that counts; its name, or nothing if the run has not two checkpoints yet."""
    rng, root = random.Random(at), os.path.join(folder, "checkpoints")
    if not os.path.isdir(root):
        return ""
    names = [name for name in sorted(os.listdir(root)) if os.path.exists(os.path.join(root, name, "COMMIT.json"))]
    if len(names) < 2:
        return ""
    kinds = [_files(os.path.join(root, names[-1]))]
    state = os.path.join(folder, "state")
    if os.path.isdir(state):
        for part in ("log", "manifests", "histograms"):
            kinds.append(_files(os.path.join(state, part))[-1:])
        kinds.append([os.path.join(state, name) for name in ("zarr.json", "schema.json")])
        kinds.append(_chunks(state, names[-1], names[-2]))
    kinds = [[path for path in kind if os.path.isfile(path)] for kind in kinds]
    path = rng.choice(rng.choice([kind for kind in kinds if kind]))
    change = HARMS[harm]
    if change is None:
        os.remove(path)
        return os.path.relpath(path, folder)
    with open(path, "rb") as f:
        data = f.read()
    if not data:
        return ""
    with open(path, "wb") as f:
        f.write(change(data))
    return os.path.relpath(path, folder)


def _files(folder: str) -> list[str]:
    return sorted(os.path.join(base, name) for base, _, names in os.walk(folder) for name in names)


def _chunks(state: str, newest: str, before: str) -> list[str]:
    """Of the newest snapshot alone: one that the checkpoint before it has too would cost both."""
    store = state_store.open(state)
    if not {newest, before} <= {entry.name for entry in store.snapshots()}:
        return []
    new, old = store.manifest(newest).refs, store.manifest(before).refs
    return [chunk_url(store.url, name, shard, ref.token) for name in new for shard, ref in new[name].items()
            if old.get(name, {}).get(shard) != ref]
