"""Proves that decisions are kept exactly: replayed after a kill, undone and redone per person, settled, exported."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Shard, ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.tools.explore.decisions import Action, Decisions
from tests.helpers.exploring import desk_of


@pytest.fixture
def decisions(tmp_path) -> Decisions:
    index = ShardIndex(str(tmp_path), ["a", "b", "c"], [Shard("s0.tar", 5, 0), Shard("s1.tar", 5, 0)])
    index.save()
    writer = SidecarWriter(index, "labels", UNKNOWN, {})
    for shard in range(2):
        writer.write(shard, SparseLabels.from_lists([[0]] * 5, [[]] * 5))
    return Decisions(str(tmp_path / "decisions.jsonl"), writer.close())


class Naive:
    """The whole history kept as a list per person; votes are computed anew from it each time."""

    def __init__(self):
        self.events: list[tuple[str, tuple, str, bool]] = []  # of votes that hold, in their order
        self.undone: dict[str, list] = {}

    def act(self, action: Action) -> None:
        if action.decision == "undo":
            mine = [i for i, event in enumerate(self.events) if event[0] == action.who]
            if mine:
                self.undone.setdefault(action.who, []).append(self.events.pop(mine[-1]))
        elif action.decision == "redo":
            if self.undone.get(action.who):
                self.events.append(self.undone[action.who].pop())
        else:
            self.undone[action.who] = []
            self.events.append((action.who, action.entry, action.decision, action.settles))

    def votes(self) -> dict:
        found: dict[tuple, dict[str, str]] = {}
        for who, entry, word, settles in self.events:
            votes = found.setdefault(entry, {})
            if settles:
                votes.clear()
            votes[who] = word
            if word == "clear":
                del votes[who]
        return {entry: votes for entry, votes in found.items() if votes}


@pytest.mark.parametrize("seed", range(5))
def test_any_history_equals_a_naive_one(decisions, seed):
    """Random votes, undos and redos of one person, and of three who keep to entries of their own."""
    rng, naive = random.Random(seed), Naive()
    people = ["ann"] if seed % 2 else ["ann", "bob", "zoë"]
    for number in range(300):
        who = rng.choice(people)
        word = rng.choice(["accept", "reject", "skip", "clear", "undo", "redo", "undo"])
        entry = None if word in ("undo", "redo") else (rng.randrange(2), rng.randrange(5), people.index(who))
        action = Action(word, entry, who, "missing", None, number, settles=len(people) == 1 and rng.random() < 0.2)
        naive.act(action)
        decisions.act([action])
        assert decisions.votes == naive.votes()
    again = Decisions(decisions.path, decisions.sidecar)
    assert (again.votes, again.made) == (decisions.votes, decisions.made)
    for one in (again, decisions):
        one.act([Action("undo", None, people[0])])
    assert again.votes == decisions.votes, "what can be undone outlives a restart"


def test_people_agree_and_disagree(decisions):
    entry, other = (0, 1, 2), (1, 0, 0)
    decisions.decide(entry, "accept", "ann")
    decisions.decide(entry, "skip", "bob")
    assert decisions.made == {entry: "accept"}
    assert decisions.second_looks("zoë") == [entry]
    assert decisions.second_looks("bob") == []
    decisions.decide(entry, "reject", "bob")
    decisions.decide(other, "reject", "bob")
    assert decisions.made == {other: "reject"}, "what is in dispute is not decided"
    assert decisions.conflicts() == [entry]
    assert decisions.counts() == {"accept": 0, "reject": 1, "conflicts": 1}
    decisions.act([Action("reject", entry, "zoë", settles=True)])
    assert decisions.made == {entry: "reject", other: "reject"}
    assert decisions.conflicts() == []
    decisions.act([Action("undo", None, "zoë")])
    assert decisions.conflicts() == [entry]
    decisions.act([Action("undo", None, "ann")])
    assert decisions.made == {entry: "reject", other: "reject"}, "ann's vote is gone, bob's stays"


def test_what_comes_twice_counts_once(decisions):
    """A page that does not know whether its request arrived sends it again; also after a restart of the server."""
    action = Action("accept", (0, 0, 0), "ann", id="x1")
    decisions.act([action, action])
    decisions.act([Action("undo", None, "ann", id="x2"), action])
    again = Decisions(decisions.path, decisions.sidecar)
    again.act([action])
    assert again.votes == decisions.votes == {}


def test_the_last_answers(decisions):
    """Answers to suggestions only, an entry once, nothing that was undone."""
    for number, word in enumerate(["accept", "accept", "reject", "skip", "accept"]):
        decisions.act([Action(word, (0, number, 1), "ann", "missing")])
    decisions.act([Action("reject", (1, 1, 1), "ann", "annotated")])
    assert decisions.recent("ann") == {"answers": 4, "agreed": 3}
    decisions.act([Action("reject", (0, 0, 1), "ann", "questions")])
    assert decisions.recent("ann") == {"answers": 4, "agreed": 2}
    decisions.act([Action("undo", None, "ann"), Action("undo", None, "ann"), Action("undo", None, "ann")])
    assert decisions.recent("ann") == {"answers": 3, "agreed": 2}
    decisions.act([Action("reject", (0, 4, 1), "bob", "questions")])
    assert decisions.recent("bob") == {"answers": 0, "agreed": 0}, "a question is no suggestion"


def test_mistakes(decisions):
    for action, word in ((Action("maybe", (0, 0, 0)), "legal are"), (Action("accept", (0, 5, 0)), "no such entry"),
                         (Action("accept", (0, 0, -1)), "no such entry"), (Action("undo", (0, 0, 0)), "an entry"),
                         (Action("accept"), "an entry"), (Action("accept", (0, 0, 0), "x" * 61), "a name"),
                         (Action("accept", (0, 0, 0), "a\nb"), "a name")):
        with pytest.raises(UserError, match=word):
            decisions.act([Action("accept", (0, 0, 0)), action])
    assert decisions.votes == {}, "all or nothing"
    Path(decisions.path).write_text('{"decision": "accept"}\n')
    with pytest.raises(UserError, match="line 1: not a decision"):
        Decisions(decisions.path, decisions.sidecar)


def test_decisions_survive_and_train(served, trained):
    """Decided, killed in the middle of a line, opened again, exported: a table and a sidecar with exactly that."""
    desk = served.desk
    for entry, word in (((0, 1, 4), "accept"), ((2, 0, 5), "reject"), ((3, 3, 3), "accept")):
        served.decide("ann", dict(zip(("shard", "row", "class"), entry, strict=True)) | {"decision": word})
    served.decide("ann", {"decision": "undo"})
    with open(desk.decisions.path, "a") as f:
        f.write('{"decision": "acc')
    again = desk_of(trained.scl)
    assert again.decisions.made == {(0, 1, 4): "accept", (2, 0, 5): "reject"}
    for kind in ("csv", "parquet"):
        written = again.export(kind, "")["written"]
        rows = list(csv.DictReader(open(written))) if kind == "csv" else pq.read_table(written).to_pylist()  # noqa: SIM115
        assert [(r["key"], r["name"], r["decision"], r["who"]) for r in rows] == [
            (desk.source.index.members(0).keys[1], "4", "accept", "ann"),
            (desk.source.index.members(2).keys[0], "5", "reject", "ann")]
    again.export("sidecar", "reviewed")
    reviewed, base = (Sidecar.load(desk.source.index, name) for name in ("reviewed", "single"))
    for shard in range(len(desk.source.index.shards)):
        expected = base.labels(shard).dense(10)
        if shard == 0:
            expected[1, 4] = POSITIVE
        if shard == 2:
            expected[0, 5] = NEGATIVE
        np.testing.assert_array_equal(reviewed.labels(shard).dense(10), expected)
    with pytest.raises(UserError, match="one already"):
        again.export("sidecar", "reviewed")
    assert json.loads(Path(desk.decisions.path).read_text().splitlines()[0])["who"] == "ann"
