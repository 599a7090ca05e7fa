"""Everything that a finished run has come to, as hashes by name, so that two runs can be compared bit for bit."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from typing import Any

import torch

from lacuna import state_store
from lacuna.basics import storage
from lacuna.state_store.schema import is_store
from lacuna.state_store.verify import verify
from lacuna.tools.launches import read_lines, read_trace, timeless
from lacuna.trainer.checkpoints.commits import METHOD, MODEL, Commits
from lacuna.trainer.launch import RESULTS
from lacuna.trainer.run_folder import METRICS, TRACE


def outcome(url: str) -> dict[str, str]:
    """Weights, method state, optimizer, every shard of every field, lines of metrics, samples of each step, results."""
    commits = Commits(storage.join(url, "checkpoints"))
    name = [name for name in commits.names() if commits.committed(name)][-1]
    commit = commits.commit_of(name)
    found = {"checkpoint": name}
    for file in sorted(commit["files"]):
        data = storage.read_bytes(commits.url(name, commit.get("prefix", ""), file))
        if file in (MODEL, METHOD):
            found[file] = _hash(data)
        elif file.endswith(".pt"):  # written by this drill's own ranks
            found[file] = _tensors(torch.load(io.BytesIO(data), map_location="cpu", weights_only=False))
    found |= _state(storage.join(url, "state"), name)
    found[RESULTS] = _hash(storage.read_bytes(storage.join(url, RESULTS)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = url if storage.is_local(url) else _fetched(url, scratch)
        for line in timeless(read_lines(os.path.join(folder, METRICS))):
            key = f"metrics {line['kind']} {line['step']}"
            found[key] = _hash(json.dumps(line).encode()) if key not in found else "twice"
        for step, samples in read_trace(folder).items():
            found[f"samples {step}"] = _hash(json.dumps(sorted(samples)).encode())
    return found


def lineage(url: str) -> list[int]:
    """How many ranks took each step, from the first on: those of the newest launch that took it."""
    steps: dict[int, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = os.path.join(url if storage.is_local(url) else _fetched(url, scratch), TRACE)
        for name in sorted(name for name in os.listdir(root) if name.endswith(".jsonl")):
            for line in read_lines(os.path.join(root, name)):
                launch, ranks = steps.get(line["step"], (0, 0))
                if line["launch"] >= launch:
                    steps[line["step"]] = (line["launch"], 1 + (ranks if line["launch"] == launch else 0))
    return [steps[step][1] for step in sorted(steps)]


def _state(url: str, snapshot: str) -> dict[str, str]:
    if not is_store(url):
        return {}
    store = state_store.open(url)
    reader = store.reader(snapshot)
    found = {f"state {field} {shard}": _hash(reader.read_shard(field, shard).tobytes())
             for field in store.schema.fields for shard in range(store.schema.shards)}
    return {**found, "state problems": "; ".join(str(problem) for problem in verify(store).problems)}


def _fetched(url: str, folder: str) -> str:
    traces = [f"{TRACE}/{name}" for name in storage.list_names(storage.join(url, TRACE)) if name.endswith(".jsonl")]
    for name in (METRICS, *traces):
        storage.download(storage.join(url, name), os.path.join(folder, name))
    return folder


def _tensors(node: Any) -> str:
    """Of all tensors and numbers in a nest of dicts and lists; not of how the engine was started (by conversion, or
    not), which it also writes down."""
    digest = hashlib.sha256()

    def visit(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            digest.update(node.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(node, dict):
            for key in sorted(node.keys() - {"ds_config"}, key=str):
                digest.update(str(key).encode())
                visit(node[key])
        elif isinstance(node, list | tuple):
            for item in node:
                visit(item)
        elif isinstance(node, int | float):
            digest.update(repr(node).encode())

    visit(node)
    return digest.hexdigest()[:16]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
