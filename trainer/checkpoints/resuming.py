"""What a launch resumes from: the newest pair of checkpoint and state snapshot of which every file is whole.

Metadata are there twice and mended first (a checkpoint's commit is in the fence and in COMMIT.json, a snapshot's log
entry and manifest are in the store and in the checkpoint), so that a single damaged file of them costs nothing.
"""

from __future__ import annotations

import hashlib
import logging

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.state_store.mending import drop_damaged, mend_metadata, mend_snapshot
from lacuna.state_store.schema import is_store
from lacuna.state_store.store import StateStore
from lacuna.trainer.checkpoints.commits import OF_BEST, SNAPSHOT, UNCOMMITTED, Commits, DamagedCommit
from lacuna.trainer.checkpoints.files import CheckpointFiles, DamagedFile

log = logging.getLogger("lacuna")


def open_if_there(state_url: str | None) -> StateStore | None:
    return state_store.open(state_url) if state_url and is_store(state_url) else None


def newest_whole(files: CheckpointFiles, state_url: str | None, store: StateStore | None, run: str) -> str | None:
    """Rank 0: the name of the checkpoint, None if there never was one. What is mended or passed over is said."""
    for line in mend(files, store):
        log.warning("mended: %s", line)
    damaged = ""
    for name in reversed(files.names()):
        problem = _problem(files, name, state_url, store)
        if problem and _mended_from_spare(files, name):
            problem = _problem(files, name, state_url, store)
        if problem is None:
            return name
        log.warning("checkpoint %s is torn (%s): skipped", files.url(name), problem)
        if problem != UNCOMMITTED:  # a kill leaves such ones; others were whole once
            damaged = damaged or f"{files.url(name)} ({problem})"
    if damaged:
        raise UserError(f"{damaged}: this checkpoint is damaged, and no whole one is left. Restore it, or remove {run} "
                        "to start again from the beginning.")
    return None


def mend(files: Commits, store: StateStore | None) -> list[str]:
    """Rank 0, once its launch has begun: bring back every file of metadata that another one has a copy of; what was."""
    assert files.hold is not None, "begin_launch comes first"
    done = [f"{files.url(name)}/COMMIT.json, from the log" for name in files.mend_commits()]
    if store is None:
        return done
    done += [f"{storage.join(store.url, name)}, from its copy" for name in mend_metadata(store)]
    for name in files.names():
        copy = snapshot_of(files, name)
        if copy is not None:
            done += [f"{line} in {store.url}, from {files.url(name)}" for line in
                     mend_snapshot(store, copy, files.hold.launch)]
    return done + [f"removed from {store.url}: {line}" for line in drop_damaged(store, files.hold.launch)]


def snapshot_of(files: Commits, name: str) -> bytes | None:
    """The copy of the state snapshot that a checkpoint has, if both are whole."""
    try:
        commit = files.commit_of(name)
        facts = commit["files"].get(SNAPSHOT)
        if facts is None:
            return None
        data = storage.read_bytes(files.url(name, commit.get("prefix", ""), SNAPSHOT))
    except (FileNotFoundError, DamagedCommit):
        return None
    return data if hashlib.sha256(data).hexdigest() == facts["sha256"] else None


def _problem(files: CheckpointFiles, name: str, state_url: str | None, store: StateStore | None) -> str | None:
    return files.problem(name) or _state_problem(name, state_url, store) or _best_problem(files, name)


def _mended_from_spare(files: CheckpointFiles, name: str) -> bool:
    """Whether tensors of this checkpoint or of its best epoch's could be brought back; what was, is said."""
    try:
        step = files.commit_of(name)["position"].get("best_step")
    except (FileNotFoundError, DamagedCommit):
        return False
    best = [files.name(step)] if isinstance(step, int) else []
    mended = [files.url(one, file) for one in dict.fromkeys([name, *best]) for file in files.mend_from_spare(one)]
    for url in mended:
        log.warning("mended: %s, from its spare copy", url)
    return bool(mended)


def _state_problem(name: str, state_url: str | None, store: StateStore | None) -> str | None:
    if state_url is None:
        return None
    if store is None:
        return f"its per-sample state is not at {state_url}"
    return None if name in {entry.name for entry in store.snapshots()} else f"its snapshot is not in {store.url}"


def _best_problem(files: CheckpointFiles, name: str) -> str | None:
    """The end of the phase goes back to its best epoch: without that one the run could not end as it should."""
    step = files.commit_of(name)["position"].get("best_step")
    best = files.name(step) if isinstance(step, int) else name
    if best == name:
        return None
    try:
        files.fetch(best, lambda file: file in OF_BEST)
    except FileNotFoundError:
        return f"the best epoch's checkpoint {best} is missing"
    except (DamagedFile, DamagedCommit) as error:
        return f"of the best epoch's checkpoint {best}, {error}"
    return None
