"""What people decided about entries: appended line by line, replayed at the next start, undone and redone per person.

A person has one vote per entry: accept, reject or skip; clear takes it back. An entry is decided (`made`) when all who
did not skip it agree; entries on which they do not are left to the list of conflicts, where one vote settles them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.tools.suggest.table import check_format, write_sidecar, write_table

ACCEPT, REJECT, SKIP, CLEAR, UNDO, REDO = "accept", "reject", "skip", "clear", "undo", "redo"
WORDS = (ACCEPT, REJECT, SKIP, CLEAR, UNDO, REDO)
# Where an accept says that the model was right; questions are also about entries that it does not believe in.
SUGGESTING = ("missing",)
_RECENT = 50
_LONGEST_TEXT = 60  # of a name or an id
Entry = tuple[int, int, int]  # shard, row, class


@dataclass(frozen=True)
class Action:
    decision: str
    entry: Entry | None = None  # None: undo and redo, which are about the person's last one
    who: str = ""
    view: str = ""  # where it was made, to come back to
    list_class: int | None = None
    place: int = 0
    settles: bool = False  # takes the place of all votes so far
    id: str = ""  # of the page that sent it: one that comes twice counts once


@dataclass(frozen=True)
class Step:
    """A vote that can be undone: the action and the entry's votes before it."""

    action: Action
    before: dict[str, str]


class Decisions:
    """Thread-safe; every decision is on disk before it is answered."""

    def __init__(self, path: str, sidecar: Sidecar):
        self.path, self.sidecar = path, sidecar
        self.votes: dict[Entry, dict[str, str]] = {}  # entry → who → accept, reject or skip
        self.made: dict[Entry, str] = {}  # entries on which everybody agrees: accept or reject
        self._done: dict[str, list[Step]] = {}
        self._undone: dict[str, list[Step]] = {}
        self._ids: set[str] = set()
        self._lock = threading.Lock()
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    if line.endswith("\n"):  # a kill may have cut the last one
                        self._apply(self._parsed(line, f"{path}, line {number}"))

    def decide(self, entry: Entry, decision: str, who: str = "") -> None:
        self.act([Action(decision, entry, who)])

    def act(self, actions: Iterable[Action]) -> list[Step]:
        """Votes, undos and redos in their order, all on disk at once; returns what was undone and redone."""
        actions = [self._checked(action) for action in actions]
        with self._lock:
            first = {action.id: i for i, action in reversed(list(enumerate(actions)))}
            fresh = [action for i, action in enumerate(actions)
                     if not action.id or (action.id not in self._ids and first[action.id] == i)]
            lines = [json.dumps({**asdict(action), "time": time.time()}) + "\n" for action in fresh]
            with open(self.path, "a", encoding="utf-8") as f:
                f.writelines(lines)
                f.flush()
                os.fsync(f.fileno())
            return [step for action in fresh if (step := self._apply(action)) is not None]

    def _checked(self, action: Action) -> Action:
        if action.decision not in WORDS:
            raise UserError(f"decision {action.decision!r}: legal are {', '.join(WORDS)}.")
        if max(len(action.who), len(action.id)) > _LONGEST_TEXT or not action.who.isprintable():
            raise UserError(f"a name has at most {_LONGEST_TEXT} letters that can be printed.")
        if (action.entry is None) != (action.decision in (UNDO, REDO)):
            raise UserError(f"{action.decision}: an entry belongs to a vote, and to nothing else.")
        if action.entry is not None:
            shard, row, cls = action.entry
            index = self.sidecar.index
            if not (0 <= shard < len(index.shards) and 0 <= row < index.shards[shard].count
                    and 0 <= cls < len(index.classes)):
                raise UserError(f"no such entry: shard {shard}, row {row}, class {cls}.")
        return action

    def _apply(self, action: Action) -> Step | None:
        """The step that was undone or redone, if the action is such a one."""
        if action.id:
            self._ids.add(action.id)
        done, undone = (stacks.setdefault(action.who, []) for stacks in (self._done, self._undone))
        if action.decision == UNDO:
            if not done:
                return None
            undone.append(done.pop())
            self._take_back(undone[-1])
            return undone[-1]
        if action.decision == REDO:
            if not undone:
                return None
            step = undone.pop()
            self._vote(step.action)
            done.append(step)
            return step
        assert action.entry is not None
        done.append(Step(action, dict(self.votes.get(action.entry, {}))))
        undone.clear()
        self._vote(action)
        return None

    def _vote(self, action: Action) -> None:
        assert action.entry is not None
        votes = {} if action.settles else self.votes.get(action.entry, {})
        if action.decision == CLEAR:
            self._set(action.entry, {who: word for who, word in votes.items() if who != action.who})
        else:
            self._set(action.entry, {**votes, action.who: action.decision})

    def _take_back(self, step: Step) -> None:
        """The person's vote as it was; what others have said since stays."""
        entry, who = step.action.entry, step.action.who
        assert entry is not None
        others = {name: word for name, word in self.votes.get(entry, {}).items() if name != who}
        old = step.before if step.action.settles else {name: word for name, word in step.before.items() if name == who}
        self._set(entry, {**old, **others})

    def _set(self, entry: Entry, votes: dict[str, str]) -> None:
        if votes:
            self.votes[entry] = votes
        else:
            self.votes.pop(entry, None)
        words = {word for word in votes.values() if word != SKIP}
        if len(words) == 1:
            self.made[entry] = words.pop()
        else:
            self.made.pop(entry, None)

    def conflicts(self) -> list[Entry]:
        """Entries on which people disagree."""
        return sorted(entry for entry, votes in list(self.votes.items()) if {ACCEPT, REJECT} <= set(votes.values()))

    def second_looks(self, who: str) -> list[Entry]:
        """Entries that others decided and this person has not."""
        return sorted(entry for entry, votes in list(self.votes.items())
                      if who not in votes and {ACCEPT, REJECT} & set(votes.values()))

    def counts(self) -> dict[str, int]:
        values = list(self.made.values())
        return {**{word: values.count(word) for word in (ACCEPT, REJECT)}, "conflicts": len(self.conflicts())}

    def recent(self, who: str) -> dict[str, int]:
        """Of the person's last answers to suggestions: how many there are, how often the model was right."""
        found: dict[Entry, str] = {}
        for step in reversed(self._done.get(who, [])):
            action = step.action
            if action.view in SUGGESTING and action.entry is not None and action.entry not in found:
                word = self.votes.get(action.entry, {}).get(who)
                if word in (ACCEPT, REJECT):
                    found[action.entry] = word
            if len(found) == _RECENT:
                break
        return {"answers": len(found), "agreed": list(found.values()).count(ACCEPT)}

    def save_table(self, url: str) -> int:
        """CSV or Parquet with one row per decision; returns how many."""
        check_format(url, "export")
        index, entries = self.sidecar.index, sorted(self.made)
        keys: dict[int, list[str]] = {}
        columns: dict[str, list] = {name: [] for name in ("key", "shard", "row", "class", "name", "decision", "who")}
        for shard, row, cls in entries:
            if shard not in keys:
                keys = {shard: index.members(shard).keys}  # entries are sorted: one shard's keys at a time
            who = ", ".join(sorted(name for name in self.votes[shard, row, cls] if name))
            for name, value in zip(columns, (keys[shard][row], shard, row, cls, index.classes[cls],
                                             self.made[shard, row, cls], who), strict=True):
                columns[name].append(value)
        write_table(url, columns)
        return len(entries)

    def save_sidecar(self, name: str) -> int:
        """The run's labels with accepted entries positive and rejected ones negative."""
        entries = {entry: POSITIVE if word == ACCEPT else NEGATIVE for entry, word in self.made.items()}
        write_sidecar(self.sidecar, name, entries, {"by": "lacuna explore", **self.counts()})
        return len(entries)

    def _parsed(self, line: str, where: str) -> Action:
        """Checked like one that comes from a page: the file may be a stranger's."""
        try:
            body = parse_json(line)
            body.pop("time")
            if body["entry"] is not None:
                shard, row, cls = (int(number) for number in body["entry"])
                body["entry"] = (shard, row, cls)
            return self._checked(Action(**{**body, "who": str(body["who"])}))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise UserError(f"{where}: not a decision ({type(error).__name__}: {error}). Remove the line, or the "
                            "file to begin anew.") from None
