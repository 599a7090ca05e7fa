"""Proves that questions are open entries, that explore shows them, and that the loop trains with the answers."""

from __future__ import annotations

import csv
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import UNKNOWN
from lacuna.tools.cli import main
from lacuna.tools.explore import open_desk
from lacuna.tools.select.questions import drawn_by_lot
from tests.helpers.answering import answer_all, decisions


@pytest.fixture
def run(trained, tmp_path) -> str:
    """A copy, whose decisions are its own."""
    return str(shutil.copytree(trained.scl, tmp_path / "runs" / "scl"))


def select(run, out, *words: str) -> list[dict]:
    assert main(["select", str(run), "--out", str(out), "--workers", "1", *words]) == 0
    with open(out, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def entries(table: list[dict]) -> list[tuple[int, int, int]]:
    return [(int(row["shard"]), int(row["row"]), int(row["class"])) for row in table]


def test_questions_are_open_entries_and_explore_shows_them(trained, run, tmp_path):
    index = ShardIndex.load(str(trained.data / "train"))
    labels = Sidecar.load(index, "single")
    out, first = tmp_path / "q.csv", {}
    for way in ("gain", "uncertain", "random"):
        table = select(run, out, "--by", way, "--budget", "40")
        first[way] = entries(table)
        assert len(set(first[way])) == 40
        for row in table:
            dense = labels.labels(int(row["shard"])).dense(10, np.array([int(row["row"])]))[0]
            assert dense[int(row["class"])] == UNKNOWN
            assert row["key"] == index.members(int(row["shard"])).keys[int(row["row"])]
    scores = [abs(float(row["score"]) - 0.5) for row in select(run, out, "--by", "uncertain", "--budget", "40")]
    assert scores == sorted(scores)
    assert first["random"] != first["uncertain"] != first["gain"]
    table = select(run, out, "--budget", "40")
    desk = open_desk(str(run), None, SimpleNamespace(workers=1, address=None, parts=None, scores=None))
    page = desk.page("questions", None, 0, 200)
    assert page["total"] == 40
    assert [(item["shard"], item["row"], item["class"]) for item in page["items"]] == entries(table)
    answer_all(str(run), trained.data / "train", "single", "labels")
    assert len(decisions(str(run), trained.data / "train", "single").made) == 40
    again = entries(select(run, out, "--budget", "40"))
    assert not set(again) & set(entries(table)), "decided entries are not asked again"


def test_a_lot_is_drawn_among_the_highest_and_counts_when_answered(trained, run, tmp_path):
    table = select(run, tmp_path / "q.csv", "--by", "lot", "--budget", "50", "--top", "20")
    asked = entries(table)
    assert np.bincount([cls for *_, cls in asked], minlength=10).tolist() == [5] * 10
    home = f"{run}/explore"
    assert drawn_by_lot(home, set(asked)) == set(asked)
    rest = set(asked) - {asked[0]}
    assert drawn_by_lot(home, rest) == {entry for entry in asked if entry[2] != asked[0][2]}
    highest = select(run, tmp_path / "all.csv", "--by", "lot", "--budget", "200", "--top", "20")
    assert set(asked) <= set(entries(highest)), "every one of the highest twenty, and the five are among them"


def test_whole_images_of_different_groups(trained, run, tmp_path):
    """The budget counts images, each group gives one, and explore asks image after image, the likeliest class first."""
    assert main(["annotate", str(trained.data / "train"), "--scheme", "groups", "--name", "tens", "--pattern",
                 "^(.*)[0-9]$", "--overwrite"]) == 0
    table = select(run, tmp_path / "q.csv", "--questions", "images", "--budget", "8", "--groups", "tens")
    images = list(dict.fromkeys((row["shard"], row["row"]) for row in table))
    assert len(images) == 8
    assert len({row["key"][:-1] for row in table}) == 8
    places = [images.index((row["shard"], row["row"])) for row in table]
    assert places == sorted(places)
    assert all(sum(place == at for place in places) == 9 for at in range(8)), "all but the annotated class"
    desk = open_desk(str(run), None, SimpleNamespace(workers=1, address=None, parts=None, scores=None))
    asked = desk.page("questions", None, 0, 200)["items"]
    assert [(item["shard"], item["row"], item["class"]) for item in asked] == entries(table)


def test_the_loop_trains_with_the_answers(trained, run, tmp_path, capsys):
    assert main(["select", str(run), "--budget", "60", "--rounds", "1", "--answers", "labels", "--workers", "1",
                 "--json"]) == 0
    start, after = json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"]
    assert start["answered"] == 0
    assert after["answered"] == 60
    assert start["test_map"] is not None
    assert after["test_map"] is not None
    index = ShardIndex.load(str(trained.data / "train"))
    truth, base, made = (Sidecar.load(index, name) for name in ("labels", "single", "scl-gain-round1"))
    fresh = 0
    for shard in range(len(index.shards)):
        told, before, known = (s.labels(shard).dense(10) for s in (made, base, truth))
        changed = told != before
        fresh += int(changed.sum())
        np.testing.assert_array_equal(told[changed], known[changed])
    assert fresh == 60
    assert after["yes"] == int(made.positives.sum() - base.positives.sum()) > 0


def test_mistakes(trained, capsys):
    for words, said in ((["--budget", "0"], "at least 1"), (["--rounds", "2"], "--answers"),
                        (["--out", "q.txt"], ".csv"), (["--labels", "labels"], "knows every entry"),
                        (["--by", "lot", "--budget", "3"], "each of the 10 classes"),
                        (["--by", "lot", "--questions", "images"], "plain draw"), (["--per-group", "0"], "at least 1"),
                        (["--groups", "nobody"], "no groups named 'nobody'")):
        assert main(["select", trained.scl, "--workers", "1", *words]) == 2
        assert said in capsys.readouterr().err
