"""The commit log: attempts (launches) and snapshots in one sequence of objects, each created exclusively.

Starting an attempt and publishing a snapshot compete for the same next number, so a stale launch cannot publish: either
its entry came first and the new launch saw it, or the new launch's entry is there and the stale one is refused.
There is no window in between. Attempt entries are never removed: a number that a sleeping process once listed as
free stays taken.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json

_NAME = re.compile(r"(\d{8})\.json$")
_TRIES = 50


class StaleAttempt(UserError):
    """This launch has been replaced by a newer one and must not write any more."""


@dataclass(frozen=True)
class Entry:
    number: int
    kind: str  # "attempt", "snapshot", or "removed" (keeps numbers rising when the last snapshot is deleted)
    attempt: int
    name: str = ""
    manifest: str = ""  # token of the manifest object
    sha256: str = ""
    created: float = 0.0
    meta: dict = field(default_factory=dict)


class Log:
    def __init__(self, store: str):
        self.url = storage.join(store, "log")
        self._known: dict[int, Entry] = {}  # entries never change, so each is read once

    def entries(self) -> list[Entry]:
        numbers = {int(m[1]) for m in map(_NAME.fullmatch, storage.list_names(self.url)) if m}
        for number in sorted(numbers - self._known.keys()):
            entry = self._read(number)
            if entry is not None:
                self._known[number] = entry
        self._known = {n: e for n, e in self._known.items() if n in numbers}
        return [self._known[n] for n in sorted(self._known)]

    def append(self, body: Callable[[list[Entry]], dict]) -> Entry:
        """Publish an entry; `body` sees the entries before it and may refuse. Retried when someone else was faster."""
        for _ in range(_TRIES):
            entries = self.entries()
            number = entries[-1].number + 1 if entries else 1
            content = {"created": time.time(), "id": uuid.uuid4().hex, **body(entries)}
            if storage.create_exclusive(self._url(number), json.dumps(content).encode()):
                return _parse(number, content)
        raise UserError(f"{self.url}: other processes took the next number {_TRIES} times in a row. Is more than one "
                        "launch running on this store?")

    def remove(self, numbers: list[int], attempt: int) -> None:
        """Remove snapshot entries; if the last one goes, a note keeps its number from being used again."""
        entries = self.entries()
        if entries and entries[-1].number in numbers:
            self.append(lambda _: {"kind": "removed", "attempt": attempt})
        storage.remove([self._url(number) for number in numbers])
        for number in numbers:
            self._known.pop(number, None)

    def newest_attempt(self, entries: list[Entry] | None = None) -> int:
        entries = self.entries() if entries is None else entries
        return max((e.attempt for e in entries if e.kind == "attempt"), default=0)

    def check_current(self, attempt: int, entries: list[Entry] | None = None) -> None:
        newest = self.newest_attempt(entries)
        if newest != attempt:
            raise StaleAttempt(f"attempt {attempt} may not write to this store: attempt {newest} is the newest. "
                               "Another launch has taken over; stop this one.")

    def _read(self, number: int) -> Entry | None:
        url = self._url(number)
        try:
            return _parse(number, parse_json(storage.read_bytes(url)))
        except FileNotFoundError:
            return None  # removed since it was listed
        except UserError:
            raise  # of the storage
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{url}: damaged log entry ({type(error).__name__}: {error}). Entries are written whole, "
                            "so this is disk damage: restore the file from a backup, or delete it to lose only "
                            "that snapshot.") from None

    def _url(self, number: int) -> str:
        return storage.join(self.url, f"{number:08d}.json")


def _parse(number: int, body: dict) -> Entry:
    kind, manifest = str(body["kind"]), str(body.get("manifest", ""))
    if not manifest.isprintable() or "/" in manifest:
        raise ValueError(f"{manifest!r} names no manifest")
    return Entry(number, kind, int(body["attempt"]), str(body.get("name", "")), manifest,
                 str(body.get("sha256", "")), float(body.get("created", 0.0)), dict(body.get("meta", {})))
