"""Checkpoints: every rank writes, files are synced and hashed, then one COMMIT.json makes them count.

A checkpoint is a folder `checkpoints/step-00000120/`:
    engine/                DeepSpeed's files (weights, optimizer), loaded only after their hashes match
    model.safetensors      the weights alone, for evaluation and export; ema.safetensors if the EMA is on
    method.safetensors     the method's class-level and global state
    snapshot.json          log entry and manifest of the state snapshot that belongs to it, to mend the store with
    COMMIT.json            written last, atomically: where training stands, names, sizes and hashes of all the others
Of the best epoch's checkpoint, to which the end of the phase goes back, `checkpoints/spare/` has the tensors once more.
A folder without a valid COMMIT.json is torn: it is skipped with a warning and removed by the next save. On object
storage the same files are uploaded before the commit (files.py). What a launch resumes from: resuming.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import Hold
from lacuna.basics.refusals import refusal
from lacuna.state_store.log import fence_of
from lacuna.trainer.checkpoints.commits import COMMIT, EMA, METHOD, MODEL, OF_BEST, SNAPSHOT
from lacuna.trainer.checkpoints.files import CheckpointFiles, DamagedFile
from lacuna.trainer.checkpoints.resuming import newest_whole, open_if_there
from lacuna.trainer.run_folder import RunFolder
from lacuna.trainer.world import World

if TYPE_CHECKING:
    from lacuna.trainer.sample_state import NoState, SampleState

log = logging.getLogger("lacuna")


@dataclass(frozen=True)
class Position:
    """Where a run stands; everything else about the data order follows from it and the config."""

    phase: int = 0
    epoch: int = 0  # of the phase
    step: int = 0  # of the epoch
    total_steps: int = 0  # of the run
    best_score: float | None = None  # validation mAP of the phase's best epoch
    best_step: int | None = None  # total_steps of its checkpoint
    epoch_sums: dict[str, dict] = field(default_factory=dict)  # rank → running sums of the epoch in progress

    def advanced(self, **changes) -> Position:
        return replace(self, **changes)


@dataclass(frozen=True)
class Checkpoint:
    folder: str  # local, with its files checked
    url: str
    position: Position
    world: int
    zero_stage: int
    fingerprints: dict[str, str]
    epochs: list[int]  # of every phase, when it was written

    @property
    def name(self) -> str:
        """Also the name of the state store's snapshot that belongs to it."""
        return os.path.basename(self.url)

    def weights(self) -> dict[str, torch.Tensor]:
        """The averaged weights if there are any, else the plain ones."""
        ema = os.path.join(self.folder, EMA)
        return load_file(ema if os.path.exists(ema) else os.path.join(self.folder, MODEL))


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: RunFolder, world: World, keep: int, fingerprints: dict[str, str], epochs: list[int],
                 state_url: str | None = None):
        """`state_url`: where the per-sample state is, if the method has any; its log is then the run's fence, too."""
        self.folder, self.files = folder, CheckpointFiles(folder, world, fence_of(state_url) if state_url else None)
        self.world, self.keep, self.fingerprints, self.state_url = world, keep, fingerprints, state_url
        self.epochs = epochs

    @property
    def hold(self) -> Hold:
        assert self.files.hold is not None, "begin_launch comes first"
        return self.files.hold

    def save(self, engine, ema: torch.nn.Module | None, method_state: dict[str, torch.Tensor], position: Position,
             zero_stage: int, state: SampleState | NoState) -> None:
        name = self.files.name(position.total_steps)
        folder = self.files.target(name)
        with self._saying_what_was_refused(folder):
            self.files.begin(name)
            engine.save_checkpoint(folder, tag="engine", save_latest=False)
            if self.world.main:
                _save_tensors(os.path.join(folder, MODEL), engine.module.state_dict())
                if ema is not None:
                    _save_tensors(os.path.join(folder, EMA), ema.state_dict())
                _save_tensors(os.path.join(folder, METHOD), method_state)
            copy = state.snapshot(name)
            if copy is not None:
                storage.write_atomic(os.path.join(folder, SNAPSHOT), copy)
            self.world.barrier()
            body = self.files.publish(name)
            self.folder.push()
            self.world.barrier()
            if self.world.main:
                if position.best_step == position.total_steps:
                    self.files.spare(name, body)
                self.files.commit(name, {**body, "world": self.world.size, "zero_stage": zero_stage,
                                         "fingerprints": self.fingerprints, "epochs": self.epochs,
                                         "position": asdict(position)})
                kept = self._collect(position)
                state.collect(kept)
            self.world.barrier()

    @contextlib.contextmanager
    def _saying_what_was_refused(self, folder: str) -> Iterator[None]:
        """A full disk and the like, in one sentence whoever reports it; no half checkpoint is left."""
        try:
            yield
        except Exception as error:
            refused = None if isinstance(error, UserError) else refusal(error, folder)
            if refused is None:
                raise
            before: list[str] = []
            with contextlib.suppress(OSError):
                before = [name for name in self.files.names() if self.files.committed(name)]
            if not os.path.exists(os.path.join(folder, COMMIT)):
                shutil.rmtree(folder, ignore_errors=True)
            after = f"goes on from {before[-1]}" if before else "begins anew, as no checkpoint was finished before"
            raise UserError(f"{folder}: this checkpoint could not be written: {refused}, or keep fewer checkpoints "
                            f"(train.keep). Then start again: the run {after}.") from error

    def begin_launch(self) -> Checkpoint | None:
        """Take the run over from any older launch; the newest whole checkpoint, agreed on by all ranks."""
        store = open_if_there(self.state_url) if self.world.main else None  # before anything is touched
        self.files.begin_launch()
        found = newest_whole(self.files, self.state_url, store, self.folder.url) if self.world.main else None
        found = self.world.broadcast(found)
        return None if found is None else self._read(found, lambda file: True)

    def at(self, total_steps: int) -> Checkpoint:
        """A checkpoint of this run, for its weights and method state."""
        return self._read(self.files.name(total_steps), lambda file: file in OF_BEST)

    def _read(self, name: str, wanted: Callable[[str], bool]) -> Checkpoint:
        commit = self.files.commit_of(name)
        for key, value in commit["fingerprints"].items():
            if self.fingerprints.get(key, value) != value:
                raise UserError(
                    f"{self.files.url(name)}: made with another {key} ({value}) than this run's "
                    f"({self.fingerprints[key]}). Use another name=…, or remove {self.folder.url} to start again."
                )
        if self.world.leads_node if self.folder.remote else self.world.main:
            try:
                self.files.fetch(name, wanted)
            except DamagedFile as error:
                raise UserError(f"{self.files.url(name)}: {error}. Start again: the run goes on from the newest "
                                "checkpoint that is whole.") from None
        self.world.barrier()
        folder = self.files.folder(name)
        position = Position(**commit["position"])
        return Checkpoint(folder, self.files.url(name), position, commit["world"], commit["zero_stage"],
                          commit["fingerprints"], commit["epochs"])

    def _collect(self, position: Position) -> list[str]:
        """Remove what is neither among the last k commits nor the best; the names of what is kept.

        What is newer than this one is damaged: the run would have gone on from it.
        """
        names = self.files.names()
        whole = [name for name in names if name <= self.files.name(position.total_steps) and self.files.committed(name)]
        kept = set(whole[-self.keep :])
        if position.best_step is not None:
            kept.add(self.files.name(position.best_step))
        for name in names:
            if name not in kept:
                self.files.remove(name)
        self.files.remove_spares(kept)
        return sorted(kept)


def load_method_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return load_file(os.path.join(checkpoint.folder, METHOD))


def _save_tensors(path: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
