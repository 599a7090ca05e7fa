"""A dataset folder that appears whole or not at all.

Locally everything is written to `<out>.partial` and renamed at the end; a killed `make` leaves only that, and the next
one starts it afresh. Object storage cannot rename: there index.json is written last, and a folder without it is no
dataset.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from typing import BinaryIO

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import INDEX_NAME

_LOCK_NAME = ".lock"
_OUR_TAR = re.compile(r"shard-\d{5,}\.tar")


class OutputFolder:
    """`url` is where to write; `publish` makes it `out`. Use as a context manager."""

    def __init__(self, out: str, overwrite: bool):
        self.out, self.overwrite = out.rstrip("/") or "/", overwrite
        self.local = storage.is_local(out)
        # Beside the real folder: a link to another disk must not make us write to this one.
        self.final = os.path.realpath(storage.local_path(self.out)) if self.local else self.out
        self.url = self.final + ".partial" if self.local else self.out
        self._lock: BinaryIO | None = None

    def __enter__(self) -> OutputFolder:
        self._refuse_existing()
        if self.local:
            try:
                os.makedirs(self.url, exist_ok=True)
            except OSError as error:
                raise UserError(f"--out {self.out}: cannot create {self.url} ({error.strerror}). "
                                "Choose another place.") from None
            self._take_lock()
            for name in os.listdir(self.url):
                _remove_tree(os.path.join(self.url, name), keep=_LOCK_NAME)
        else:
            # Index first: from here on until `publish` nobody takes the folder for a dataset.
            storage.remove([storage.join(self.out, INDEX_NAME)])
            for folder in ("members", "labels"):
                storage.remove_tree(storage.join(self.out, folder))
        return self

    def __exit__(self, kind, value, trace) -> None:
        if self._lock is not None:
            self._lock.close()
        if kind is not None and self.local:
            shutil.rmtree(self.url, ignore_errors=True)

    def publish(self, tars: set[str]) -> None:
        """Local: make everything durable and rename. Remote: drop shards that an earlier make left behind."""
        if not self.local:
            names = [n for n in storage.list_names(self.out) if _OUR_TAR.fullmatch(n) and n not in tars]
            storage.remove([storage.join(self.out, n) for n in names])
            return
        os.remove(os.path.join(self.url, _LOCK_NAME))
        _sync_tree(self.url)
        old = None
        try:
            if os.path.exists(self.final):
                old = f"{self.final}.old-{uuid.uuid4().hex[:8]}"
                os.rename(self.final, old)
            os.rename(self.url, self.final)
        except OSError as error:  # a mount point cannot be renamed
            raise UserError(f"--out {self.out}: cannot be replaced ({error.strerror}). "
                            "Choose a folder below it.") from None
        storage.sync_folder(os.path.dirname(self.final))
        if old is not None:
            shutil.rmtree(old)

    def _refuse_existing(self) -> None:
        if storage.exists(storage.join(self.out, INDEX_NAME)):
            if not self.overwrite:
                raise UserError(f"--out {self.out}: there is a finished dataset already. Choose another folder, or "
                                "replace it with --overwrite.")
        elif self.local and (names := storage.list_names(self.out)):
            raise UserError(f"--out {self.out}: the folder is not empty (it has {names[0]!r}) and is no dataset of "
                            "ours. Choose another folder, or empty it.")
        elif self.local and os.path.isfile(storage.local_path(self.out)):
            raise UserError(f"--out {self.out}: is a file. Choose a folder.")

    def _take_lock(self) -> None:
        # The kernel drops the lock when its holder dies, so a killed make never blocks the next one.
        lock = open(os.path.join(self.url, _LOCK_NAME), "wb")  # noqa: SIM115 - held until __exit__
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(f"--out {self.out}: another `lacuna shards make` is writing it now. Wait for it, or choose "
                            "another folder.") from None
        except OSError:
            pass  # a file system without locks: two makes at once would then disturb each other
        self._lock = lock


def _remove_tree(path: str, keep: str) -> None:
    if os.path.basename(path) == keep:
        return
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def _sync_tree(root: str) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        storage.sync_folder(folder)
