"""The fence: launches and what they commit, in one sequence of numbered objects that are each created exclusively.

Beginning a launch and committing (a state snapshot, a checkpoint) compete for the same next number, so a launch that
was replaced cannot commit: either its entry came first and the new launch saw it, or the new launch's entry is there
and the old one is refused. There is no window in between. Entries of launches are never removed: a number that a
sleeping process once listed as free stays taken. Every entry carries its own checksum; one that is damaged still takes
its number and is passed over.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json

LAUNCH, REMOVED, DAMAGED = "launch", "removed", "damaged"
_NAME = re.compile(r"(\d{8})\.json$")
_TRIES = 50
_GLANCE_SECONDS = 2.0


class LostLaunch(UserError):
    """This launch has been replaced by a newer one and must not write any more."""


@dataclass(frozen=True)
class Entry:
    number: int
    kind: str  # "launch", what a user of the fence commits, "removed" (keeps numbers rising), or "damaged"
    launch: int  # who wrote it; 0 of a damaged one
    name: str = ""
    created: float = 0.0
    body: dict = field(default_factory=dict)  # everything else


class Fence:
    def __init__(self, url: str):
        self.url = url
        self._known: dict[int, Entry] = {}  # entries never change, so each is read once

    def entries(self) -> list[Entry]:
        """All of them in order, damaged ones too."""
        numbers = {int(m[1]) for m in map(_NAME.fullmatch, storage.list_names(self.url)) if m}
        for number in sorted(numbers - self._known.keys()):
            entry = self._read(number)
            if entry is not None:
                self._known[number] = entry
        self._known = {n: e for n, e in self._known.items() if n in numbers}
        return [self._known[n] for n in sorted(self._known)]

    def append(self, kind: str, launch: Callable[[list[Entry]], int], name: str = "", **body) -> Entry:
        """Publish an entry; `launch` sees the entries before it, returns who writes this one, and may refuse.

        Tried again when somebody else was faster.
        """
        for _ in range(_TRIES):
            entries = self.entries()
            number = entries[-1].number + 1 if entries else 1
            content = {**body, "kind": kind, "launch": launch(entries), "name": name, "created": time.time(),
                       "id": uuid.uuid4().hex}
            if storage.create_exclusive(self.entry_url(number), _sealed(content)):
                self._known[number] = _parse(number, content)
                return self._known[number]
        raise UserError(f"{self.url}: other processes took the next number {_TRIES} times in a row. Is more than one "
                        "launch at work here?")

    def begin(self) -> int:
        """Take over: from here on an older launch that still runs can neither commit nor delete. The new number."""
        return self.append(LAUNCH, lambda entries: newest_launch(entries) + 1).launch

    def check(self, launch: int, entries: list[Entry] | None = None) -> None:
        """LostLaunch if a newer launch has begun."""
        newest = max((e.launch for e in (self.entries() if entries is None else entries) if e.kind == LAUNCH),
                     default=0)
        if newest > launch:
            raise LostLaunch(f"{self.url}: launch {newest} of this run has begun, so launch {launch} ends here and "
                             "writes nothing more. Let only one run at a time, or give one of them another name=….")

    def remove(self, numbers: list[int], launch: int) -> None:
        """Remove entries; if the last one goes, a note keeps its number from being used again."""
        entries = self.entries()
        if entries and entries[-1].number in numbers:
            self.append(REMOVED, lambda _: launch)
        storage.remove([self.entry_url(number) for number in numbers])
        for number in numbers:
            self._known.pop(number, None)

    def entry_url(self, number: int) -> str:
        return storage.join(self.url, f"{number:08d}.json")

    def _read(self, number: int) -> Entry | None:
        try:
            return _parse(number, _unsealed(storage.read_bytes(self.entry_url(number))))
        except FileNotFoundError:
            return None  # removed since it was listed
        except UserError:
            raise  # of the storage
        except (ValueError, KeyError, TypeError, OverflowError, AttributeError):
            return Entry(number, DAMAGED, 0)


class Hold:
    """One launch's right to write: what its writers ask before they do."""

    def __init__(self, fence: Fence, launch: int):
        self.fence, self.launch = fence, launch
        self._asked = time.monotonic()

    def check(self) -> None:
        """Before anything that counts: a commit, a deletion, results."""
        self.fence.check(self.launch)
        self._asked = time.monotonic()

    def glance(self) -> None:
        """Before a line of a log: asks the storage only now and then."""
        if time.monotonic() - self._asked > _GLANCE_SECONDS:
            self.check()


def newest_launch(entries: list[Entry]) -> int:
    """The highest number that a launch may have had: damaged entries may have been launches, too."""
    return max((e.launch for e in entries), default=0) + sum(e.kind == DAMAGED for e in entries)


def _sealed(content: dict) -> bytes:
    text = json.dumps(content)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "entry": text}).encode()


def _unsealed(data: bytes) -> dict:
    outer = parse_json(data)
    if hashlib.sha256(outer["entry"].encode()).hexdigest() != outer["sha256"]:
        raise ValueError("checksum")
    return parse_json(outer["entry"])


def _parse(number: int, content: dict) -> Entry:
    rest = {key: value for key, value in content.items() if key not in ("kind", "launch", "name", "created", "id")}
    return Entry(number, str(content["kind"]), int(content["launch"]), str(content["name"]),
                 float(content["created"]), rest)
