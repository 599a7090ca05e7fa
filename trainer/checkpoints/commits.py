"""Which checkpoints of a run count: every commit is an entry of the fence, and COMMIT.json with the same content.

The entry comes first, so that a stale launch cannot commit; the file is what readers look at. One of the two is enough:
a launch writes the file anew from the entry.
"""

from __future__ import annotations

import hashlib
import json
import os

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import Entry, Fence, Hold
from lacuna.basics.json_text import parse_json

COMMIT = "COMMIT.json"
DAMAGED = "DAMAGED.json"  # beside a commit: the state that belongs to it was found to be damaged
UNCOMMITTED = f"no {COMMIT}"
MODEL, EMA, METHOD, SNAPSHOT = "model.safetensors", "ema.safetensors", "method.safetensors", "snapshot.json"
OF_BEST = (MODEL, EMA, METHOD)  # what the best epoch's checkpoint is read for
STEP, SPARE, _ENTRY = "step-", "spare", "checkpoint"


class DamagedCommit(UserError):
    """COMMIT.json is there, but is not what was written."""


def parse_commit(data: bytes) -> dict:
    """The body of a COMMIT.json: checked against its own checksum, and for names that lead out of the folder."""
    try:
        body = parse_json(data)
        if not isinstance(body, dict) or not isinstance(body.get("files"), dict):
            raise ValueError("no list of files")
        if body.pop("sha256", None) != _checksum(body):
            raise ValueError("its checksum does not fit, or another version of Lacuna wrote it")
        for file, facts in body["files"].items():
            if os.path.isabs(file) or ".." in file.split("/"):
                raise ValueError(f"file name {file!r}")
            if not isinstance(facts, dict) or not {"bytes", "sha256"} <= facts.keys():
                raise ValueError(f"facts of {file!r}")
        if not isinstance(body.get("position"), dict):
            raise ValueError("no position")
        prefix = body.get("prefix", "")
        if not isinstance(prefix, str) or "/" in prefix or prefix == "..":
            raise ValueError(f"prefix {prefix!r}")
    except ValueError as error:
        raise DamagedCommit(f"{COMMIT} is damaged: {error}") from None
    return body


def _checksum(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def signed(body: dict) -> bytes:
    return json.dumps({**body, "sha256": _checksum(body)}, indent=1).encode()


class Commits:
    """`root` is the folder of checkpoints of a run."""

    def __init__(self, root: str, fence: Fence | None = None):
        self.root, self.fence = root, fence or Fence(storage.join(root, "log"))
        self.hold: Hold | None = None  # once a launch has begun here

    @staticmethod
    def name(total_steps: int) -> str:
        return f"{STEP}{total_steps:08d}"

    def url(self, name: str, *parts: str) -> str:
        return storage.join(self.root, name, *parts)

    def names(self) -> list[str]:
        """Of all checkpoints, whole or torn, oldest first."""
        return [name for name in storage.list_names(self.root) if name.startswith(STEP)]

    def committed(self, name: str) -> bool:
        return storage.exists(self.url(name, COMMIT)) and not storage.exists(self.url(name, DAMAGED))

    def condemn(self, name: str, reason: str) -> None:
        """Any rank: no launch shall resume from this checkpoint. Nothing is deleted, so that it can be mended."""
        if storage.exists(self.url(name, COMMIT)):
            storage.write_atomic(self.url(name, DAMAGED), json.dumps({"reason": reason}).encode())

    def remove(self, name: str) -> None:
        # The commit goes first, so that a crash half-way leaves a torn folder, not a false one.
        numbers = [entry.number for entry in self._entries() if entry.name == name]
        if numbers:
            self.fence.remove(numbers, self.hold.launch if self.hold else 0)
        storage.remove([self.url(name, COMMIT)])
        storage.remove_tree(self.url(name))

    def check_current(self) -> None:
        """Rank 0, before it publishes or deletes."""
        if self.hold:
            self.hold.check()

    def _entries(self) -> list[Entry]:
        return [entry for entry in self.fence.entries() if entry.kind == _ENTRY]

    def mend_commits(self) -> list[str]:
        """Rank 0: write COMMIT.json anew where the fence has the commit and the file is damaged or gone; the names."""
        mended = []
        for entry in self._entries():
            try:
                whole = self.commit_of(entry.name) is not None
            except (FileNotFoundError, DamagedCommit):
                whole = False
            if not whole and entry.name.startswith(STEP) and isinstance(entry.body.get("commit"), dict):
                storage.write_atomic(self.url(entry.name, COMMIT), signed(entry.body["commit"]))
                mended.append(entry.name)
        return mended

    def commit(self, name: str, body: dict) -> None:
        """Rank 0: from here on the checkpoint counts."""
        assert self.hold is not None, "begin_launch comes first"
        hold = self.hold

        def current(entries: list[Entry]) -> int:
            self.fence.check(hold.launch, entries)
            return hold.launch

        self.fence.append(_ENTRY, current, name, commit=body)
        storage.write_atomic(self.url(name, COMMIT), signed(body))

    def commit_of(self, name: str) -> dict:
        """The body of COMMIT.json; FileNotFoundError if there is none, DamagedCommit if it is damaged."""
        return parse_commit(storage.read_bytes(self.url(name, COMMIT)))
