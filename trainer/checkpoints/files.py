"""Where the files of checkpoints are: in the run folder, or staged on this node and uploaded to object storage.

On object storage a save has a prefix of its own, so that a stale launch cannot overwrite what another one commits.
What is read is checked against the hashes of the commit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import Fence, Hold
from lacuna.basics.refusals import refusal
from lacuna.trainer.checkpoints.commits import (
    COMMIT,
    DAMAGED,
    OF_BEST,
    SPARE,
    STEP,
    UNCOMMITTED,
    Commits,
    DamagedCommit,
)
from lacuna.trainer.run_folder import RunFolder
from lacuna.trainer.world import World

log = logging.getLogger("lacuna")
_TRIES = 3  # of a download whose bytes do not fit their hash
_TRANSFERS = 4  # at a time


class CheckpointFiles(Commits):
    def __init__(self, folder: RunFolder, world: World, fence: Fence | None = None):
        super().__init__(storage.join(folder.url, "checkpoints"), fence)
        self.world, self.remote = world, folder.remote
        self._fetched = folder.path("checkpoints")
        self._saving = folder.path("checkpoints", f"saving-{world.rank}")

    # ---- fencing

    def begin_launch(self) -> None:
        """From here on an older launch of this run that still goes on can neither commit nor delete."""
        launch = self.world.broadcast(self.fence.begin() if self.world.main else None)
        self.hold = Hold(self.fence, launch)

    # ---- writing

    def target(self, name: str) -> str:
        """The local folder that this rank writes a checkpoint to; shared by all ranks unless it is staged."""
        return self._saving if self.remote else self.folder(name)

    def begin(self, name: str) -> None:
        """Empty the target. Called by all ranks."""
        if self.world.main:
            self.check_current()
            self.remove(name)
        if self.remote:
            if self.world.leads_node:
                for old in storage.list_names(self._fetched):
                    if old.startswith(STEP):
                        shutil.rmtree(os.path.join(self._fetched, old), ignore_errors=True)
            shutil.rmtree(self._saving, ignore_errors=True)
            os.makedirs(self._saving)
        elif self.world.main:
            os.makedirs(self.folder(name))
        self.world.barrier()

    def publish(self, name: str) -> dict:
        """Make the written files durable; the body of the commit that names them. Called by all ranks."""
        folder = self.target(name)
        files = sorted(files_below(folder))
        prefix = ""
        if self.remote:
            prefix = self.world.broadcast(f"files-{uuid.uuid4().hex[:12]}" if self.world.main else None)
        else:
            files = files[self.world.rank :: self.world.size]

        def settle(file: str) -> dict:
            path = os.path.join(folder, file)
            if self.remote:
                facts = facts_of(path)
                storage.upload(path, self.url(name, prefix, file))
                return facts
            storage.sync_folder(path)
            return facts_of(path)

        with ThreadPoolExecutor(_TRANSFERS) as pool:
            mine = dict(zip(files, pool.map(settle, files), strict=True))
        everything: dict[str, dict] = {}
        for part in self.world.gather(mine):
            assert not everything.keys() & part.keys(), "two ranks wrote one file"
            everything |= part
        if self.world.main and not self.remote:
            below = {os.path.dirname(os.path.join(folder, file)) for file in everything}
            for base in {os.path.dirname(folder), folder, *below}:
                storage.sync_folder(base)
        return {"files": everything, "prefix": prefix}

    def spare(self, name: str, body: dict) -> None:
        """Rank 0, before the commit: the tensors of a best epoch once more, where damage to the checkpoint is not.

        A run that has room for its checkpoints and not for these goes on without them.
        """
        try:
            for file in OF_BEST:
                if file in body["files"]:
                    _copy(os.path.join(self.target(name), file), self.url(SPARE, name, file))
        except OSError as error:
            refused = refusal(OSError(error.errno, error.strerror, self.url(SPARE, name)))
            if refused is None:
                raise
            storage.remove_tree(self.url(SPARE, name))
            log.warning("%s has no spare copy of its tensors: %s", self.url(name), refused)

    def remove_spares(self, kept: set[str]) -> None:
        """Rank 0: those of checkpoints that are no more."""
        for name in storage.list_names(self.url(SPARE)):
            if name not in kept:
                storage.remove_tree(self.url(SPARE, name))

    def mend_from_spare(self, name: str) -> list[str]:
        """Rank 0: bring back tensors of a best epoch that are damaged or gone; which."""
        try:
            body = self.commit_of(name)
        except (FileNotFoundError, DamagedCommit):
            return []
        mended = []
        for file in OF_BEST:
            facts, spare = body["files"].get(file), self.url(SPARE, name, file)
            path = os.path.join(self.folder(name), file)
            if facts is None or _facts_if_there(path) == facts or not storage.exists(spare):
                continue
            _copy(spare, path)
            if facts_of(path) == facts:
                if self.remote:
                    storage.upload(path, self.url(name, body.get("prefix", ""), file))
                mended.append(file)
        return mended

    # ---- reading

    def folder(self, name: str) -> str:
        """Where its files are on this node, once fetched."""
        return os.path.join(self._fetched, name) if self.remote else storage.local_path(self.url(name))

    def problem(self, name: str) -> str | None:
        """Why a checkpoint does not count, or None if it is whole (and then it is on this node)."""
        if storage.exists(self.url(name, DAMAGED)):
            return f"its state is damaged; {DAMAGED} says where. Remove that file once the state is restored"
        try:
            body = self.commit_of(name)
        except FileNotFoundError:
            return UNCOMMITTED
        except DamagedCommit as error:
            return str(error)
        if not self.remote:
            # What no commit names must not be loaded either: DeepSpeed unpickles what it finds beside its files.
            foreign = [file for file in files_below(self.folder(name))
                       if file.startswith("engine/") and file not in body["files"]]
            if foreign:
                return f"{min(foreign)} is not in {COMMIT}"
        try:
            self.fetch(name)
        except DamagedFile as error:
            return str(error)
        return None

    def fetch(self, name: str, wanted: Callable[[str], bool] = lambda file: True) -> str:
        """The local folder of a checkpoint, with the wanted files whole and checked."""
        body, folder = self.commit_of(name), self.folder(name)

        def settle(item: tuple[str, dict]) -> None:
            file, facts = item
            path = os.path.join(folder, file)
            for _ in range(_TRIES if self.remote else 0):
                if os.path.exists(path) and facts_of(path) == facts:
                    return
                try:
                    storage.download(self.url(name, body.get("prefix", ""), file), path)
                except FileNotFoundError:
                    break
            if not os.path.exists(path):
                raise DamagedFile(f"{file} is missing")
            if facts_of(path) != facts:
                raise DamagedFile(f"{file} is damaged")

        with ThreadPoolExecutor(_TRANSFERS) as pool:
            list(pool.map(settle, [item for item in sorted(body["files"].items()) if wanted(item[0])]))
        return folder


class DamagedFile(UserError):
    """A file of a commit is missing, or is not what was written."""


def files_below(folder: str) -> list[str]:
    return [os.path.relpath(os.path.join(base, name), folder) for base, _, names in os.walk(folder) for name in names]


def _copy(source: str, target: str) -> None:
    """Between this node and where the run is, or within either; what is local appears whole and durably."""
    if not storage.is_local(source):
        storage.download(source, target)
    elif not storage.is_local(target):
        storage.upload(source, target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, f"{target}.partial")
        storage.sync_folder(f"{target}.partial")
        os.replace(f"{target}.partial", target)
        storage.sync_folder(os.path.dirname(target))


def _facts_if_there(path: str) -> dict | None:
    return facts_of(path) if os.path.exists(path) else None


def facts_of(path: str) -> dict:
    with open(path, "rb") as f:
        return {"bytes": os.fstat(f.fileno()).st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
