"""Checkpoints: every rank writes, files are synced and hashed, then one COMMIT.json makes them count.

A checkpoint is a folder `checkpoints/step-00000120/`:
    engine/                DeepSpeed's files (weights, optimizer), loaded only after their hashes match
    model.safetensors      the weights alone, for evaluation and export; ema.safetensors if the EMA is on
    method.safetensors     the method's class-level and global state
    position.json          where training stands
    COMMIT.json            written last, atomically: names, sizes and hashes of all the others
A folder without a valid COMMIT.json is torn: it is skipped with a warning and removed by the next save.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from data_pipelines import storage
from data_pipelines.errors import UserError
from trainer.world import World

if TYPE_CHECKING:
    from trainer.sample_state import SampleState

log = logging.getLogger("lacuna")
COMMIT = "COMMIT.json"
_PREFIX = "step-"


@dataclass(frozen=True)
class Position:
    """Where a run stands; everything else about the data order follows from it and the config."""

    phase: int = 0
    epoch: int = 0  # of the phase
    step: int = 0  # of the epoch
    total_steps: int = 0  # of the run
    best_score: float | None = None  # validation mAP of the phase's best epoch
    best_step: int | None = None  # total_steps of its checkpoint
    epoch_sums: dict[str, float] = field(default_factory=dict)  # running sums of the epoch in progress

    def advanced(self, **changes) -> Position:
        return replace(self, **changes)


@dataclass(frozen=True)
class Checkpoint:
    folder: str
    position: Position
    world: int
    zero_stage: int
    fingerprints: dict[str, str]

    @property
    def name(self) -> str:
        """Also the name of the state store's snapshot that belongs to it."""
        return os.path.basename(self.folder)

    def weights(self) -> dict[str, torch.Tensor]:
        """The averaged weights if there are any, else the plain ones."""
        ema = os.path.join(self.folder, "ema.safetensors")
        return load_file(ema if os.path.exists(ema) else os.path.join(self.folder, "model.safetensors"))


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_folder: str, world: World, keep: int, fingerprints: dict[str, str]):
        self.root = os.path.join(run_folder, "checkpoints")
        self.world, self.keep, self.fingerprints = world, keep, fingerprints

    def path(self, total_steps: int) -> str:
        return os.path.join(self.root, f"{_PREFIX}{total_steps:08d}")

    def save(self, engine, ema: torch.nn.Module | None, method_state: dict[str, torch.Tensor], position: Position,
             zero_stage: int, state: SampleState | None) -> None:
        folder = self.path(position.total_steps)
        with _naming_a_full_disk(folder):
            if self.world.main:
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(folder)
            self.world.barrier()
            engine.save_checkpoint(folder, tag="engine", save_latest=False)
            if self.world.main:
                _save_tensors(os.path.join(folder, "model.safetensors"), engine.module.state_dict())
                if ema is not None:
                    _save_tensors(os.path.join(folder, "ema.safetensors"), ema.state_dict())
                _save_tensors(os.path.join(folder, "method.safetensors"), method_state)
                _write_json(os.path.join(folder, "position.json"), asdict(position))
            if state is not None:
                state.snapshot(os.path.basename(folder))
            self.world.barrier()
            names = sorted(_files(folder))
            names = names[self.world.rank :: self.world.size]
            mine = {name: _sync_and_hash(os.path.join(folder, name)) for name in names}
            everything: dict[str, dict] = {}
            for part in self.world.gather(mine):
                everything |= part
            if self.world.main:
                for base in (self.root, folder, os.path.join(folder, "engine")):
                    storage.sync_folder(base)
                commit = {"files": everything, "world": self.world.size, "zero_stage": zero_stage,
                          "fingerprints": self.fingerprints}
                storage.write_atomic(os.path.join(folder, COMMIT), json.dumps(commit, indent=1).encode())
                kept = self._collect(position)
                if state is not None:
                    state.collect(kept)
            self.world.barrier()

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; torn ones are named and passed over. Checked on rank 0, agreed on by all."""
        found = None
        if self.world.main:
            for folder in reversed(self._folders()):
                problem = _problem(folder)
                if problem is None:
                    found = folder
                    break
                log.warning("checkpoint %s is torn (%s): skipped", folder, problem)
        found = self.world.broadcast(found)
        return None if found is None else self.read(found)

    def read(self, folder: str) -> Checkpoint:
        commit = _read_json(os.path.join(folder, COMMIT))
        for key, value in commit["fingerprints"].items():
            if self.fingerprints.get(key, value) != value:
                raise UserError(
                    f"{folder}: made with another {key} ({value}) than this run's ({self.fingerprints[key]}). "
                    f"Use another name=…, or remove {os.path.dirname(self.root)} to start again."
                )
        position = Position(**_read_json(os.path.join(folder, "position.json")))
        return Checkpoint(folder, position, commit["world"], commit["zero_stage"], commit["fingerprints"])

    def _folders(self) -> list[str]:
        return [os.path.join(self.root, n) for n in storage.list_names(self.root) if n.startswith(_PREFIX)]

    def _collect(self, position: Position) -> list[str]:
        """Remove what is neither among the last k commits nor the best; the names of what is kept.

        What is newer than this one is damaged: the run would have gone on from it.
        """
        whole = [f for f in self._folders() if os.path.exists(os.path.join(f, COMMIT))
                 and f <= self.path(position.total_steps)]
        kept = set(whole[-self.keep :])
        if position.best_step is not None:
            kept.add(self.path(position.best_step))
        for folder in self._folders():
            if folder not in kept:
                # The commit goes first, so that a crash half-way leaves a torn folder, not a false one.
                storage.remove([os.path.join(folder, COMMIT)])
                shutil.rmtree(folder, ignore_errors=True)
        return sorted(os.path.basename(folder) for folder in kept)


def needs_conversion(checkpoint: Checkpoint, world: World) -> bool:
    """ZeRO >= 1 partitions the optimizer over the ranks: another number of ranks needs the universal form."""
    return checkpoint.zero_stage > 0 and checkpoint.world != world.size


def load_engine(engine, checkpoint: Checkpoint, world: World) -> None:
    """Weights and optimizer into the engine; its files' hashes were checked by `latest`."""
    if not needs_conversion(checkpoint, world):
        _load(engine, checkpoint.folder)
        return
    folder = tempfile.mkdtemp(prefix="universal-", dir=checkpoint.folder) if world.main else None
    folder = world.broadcast(folder)
    if world.main:
        log.info("converting the checkpoint from %d to %d ranks", checkpoint.world, world.size)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
                   "--num_extract_workers", "1", "--num_merge_workers", "1",
                   "--input_folder", os.path.join(checkpoint.folder, "engine"),
                   "--output_folder", os.path.join(folder, "engine")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ds_to_universal failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    world.barrier()
    _load(engine, folder)
    world.barrier()
    if world.main:
        shutil.rmtree(folder, ignore_errors=True)


def _load(engine, folder: str) -> None:
    path, _ = engine.load_checkpoint(folder, tag="engine")
    if path is None:  # DeepSpeed only warns
        raise RuntimeError(f"DeepSpeed did not load {folder}/engine")


_FAILED_WRITES = ("No space left", "inline_container", "PytorchStreamWriter")


@contextlib.contextmanager
def _naming_a_full_disk(folder: str) -> Iterator[None]:
    """torch and safetensors report a failed write in their own words: say what it is, and leave no half checkpoint."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and not any(words in str(error) for words in _FAILED_WRITES):
            raise
        if not os.path.exists(os.path.join(folder, COMMIT)):
            shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(os.path.dirname(folder)).free
        raise UserError(f"{folder}: this checkpoint could not be written, its disk has {free / 1e6:,.0f} MB left "
                        f"({error}). The checkpoints before it are whole: make room, or keep fewer (train.keep), and "
                        "start again to resume.") from error


def load_method_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return load_file(os.path.join(checkpoint.folder, "method.safetensors"))


def _problem(folder: str) -> str | None:
    """Why a checkpoint does not count, or None if it is whole."""
    path = os.path.join(folder, COMMIT)
    if not os.path.exists(path):
        return f"no {COMMIT}"
    try:
        files = _read_json(path)["files"]
    except (ValueError, KeyError):
        return f"{COMMIT} is damaged"
    for name, facts in files.items():
        target = os.path.join(folder, name)
        if not os.path.exists(target):
            return f"{name} is missing"
        if os.path.getsize(target) != facts["bytes"] or _hash(target) != facts["sha256"]:
            return f"{name} is damaged"
    return None


def _files(folder: str) -> list[str]:
    return [os.path.relpath(os.path.join(base, name), folder) for base, _, names in os.walk(folder) for name in names]


def _sync_and_hash(path: str) -> dict:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": os.path.getsize(path), "sha256": _hash(path)}


def _hash(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _save_tensors(path: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def _write_json(path: str, body: dict) -> None:
    storage.write_atomic(path, json.dumps(body, indent=1).encode())


def _read_json(path: str) -> dict:
    return json.loads(storage.read_bytes(path))
