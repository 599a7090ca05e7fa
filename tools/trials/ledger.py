"""What is done: one small file per job, written whole once the job has ended. So a kill at any moment loses at most the
jobs in flight, and those go on from their own checkpoints.

  FOLDER/outcomes/NAME[@EPOCHS].json
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.trials.job import Job, Outcome
from lacuna.trainer.config.sections import Config


class Ledger:
    """In a folder or fsspec URL. Only the process that leads the work writes."""

    def __init__(self, folder: str):
        self.folder = folder
        self._root = storage.join(folder, "outcomes")
        self._known: dict[str, Outcome] = {}
        for name in storage.list_names(self._root):
            if name.endswith(".json"):
                body = json.loads(storage.read_bytes(storage.join(self._root, name)))
                self._known[name.removesuffix(".json")] = Outcome(**body)

    def outcome(self, job: Job) -> Outcome | None:
        """Of an earlier launch; a UserError if what was done under this name is something else."""
        found = self._known.get(job.label)
        if found is not None and found.key != job.key:
            raise UserError(f"{self.folder} holds results of {job.name} with other settings or data. Give another "
                            f"--out, or remove {storage.join(self._root, job.label)}.json and {job.config.folder}.")
        return found

    def seconds(self, name: str) -> float:
        """That the jobs of a trial have taken so far."""
        return max((o.seconds for label, o in self._known.items() if label.partition("@")[0] == name), default=0.0)

    def write(self, job: Job, outcome: Outcome) -> None:
        """Not of a job that was only interrupted: it will go on."""
        body = json.dumps(outcome.as_dict(), indent=1).encode()
        storage.write_atomic(storage.join(self._root, f"{job.label}.json"), body)
        self._known[job.label] = outcome

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """One process at a time leads the work in a folder (of a disk: object storage has no locks that end with their
        holder)."""
        if not storage.is_local(self.folder):
            yield
            return
        folder = storage.local_path(self.folder)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "lock"), "a+") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.folder}: another process is at work there. Wait for it, stop it, or give "
                                "another --out.") from None
            yield


def slim(config: Config) -> None:
    """Drop the weights and the state of a run that nobody will go on with; its log and metrics stay."""
    storage.remove_tree(storage.join(config.folder, "checkpoints"))
    storage.remove_tree(config.train.state_url or storage.join(config.folder, "state"))
