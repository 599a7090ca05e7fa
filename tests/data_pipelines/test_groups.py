"""Proves that groups of samples are made from keys or a table, survive saving, and are never split."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.annotate import split_groups
from lacuna.data_pipelines.groups import Groups, by_pattern, make_groups
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.subsets import Subset
from lacuna.tools.cli import main
from tests.helpers.labelled_shards import write_dataset

SIZES = [9, 0, 8, 1, 17]


@pytest.fixture
def index(tmp_path) -> ShardIndex:
    """Keys 000000 to 000034."""
    return write_dataset(str(tmp_path / "data"), np.zeros((sum(SIZES), 3), np.int8), SIZES).index


def keys_of(index: ShardIndex) -> list[str]:
    return [key for shard in range(len(index.shards)) for key in index.members(shard).keys]


def test_by_keys_and_by_a_table(index, tmp_path, capsys):
    assert main(["annotate", index.url, "--scheme", "groups", "--name", "tens", "--pattern", "(.).$", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["made"][0]
    assert (made["groups"], made["rows"]) == (4, 35)
    groups, keys = Groups.load(index, "tens"), keys_of(index)
    for a in range(35):
        for b in range(35):
            assert (groups.numbers[a] == groups.numbers[b]) == (keys[a][-2] == keys[b][-2])
    assert [len(part) for part in groups.by_shard] == SIZES

    (tmp_path / "table.tsv").write_text("".join(f"{key}\tvideo {int(key) // 4}\n" for key in keys if int(key) < 20))
    argv = ["annotate", index.url, "--scheme", "groups", "--name", "videos", "--table", str(tmp_path / "table.tsv")]
    assert main(argv) == 0
    assert main(argv) == 2
    assert "'videos' exists already" in capsys.readouterr().err
    videos = Groups.load(index, "videos")
    assert videos.count == 5
    assert [number >= 0 for number in videos.numbers] == [int(key) < 20 for key in keys]
    assert main(["annotate", index.url, "--list"]) == 0
    assert "groups videos: 20 rows in 5, fingerprint" in capsys.readouterr().out


def test_a_split_keeps_groups_whole(index):
    make_groups(index, "tens", by_pattern("(.)[0-9]$"), {})
    assert main(["annotate", index.url, "--scheme", "val_split", "--groups", "tens", "--fraction", "0.25"]) == 0
    numbers = Groups.load(index, "tens").numbers
    train, val = (np.concatenate([Subset.load(index, name).mask(s) for s in range(len(SIZES))])
                  for name in ("train", "val"))
    assert (train ^ val).all()
    assert not set(numbers[train]) & set(numbers[val])
    assert val.sum() >= 9


def test_every_split_keeps_its_share():
    for seed in range(30):
        rng = np.random.RandomState(seed)
        numbers = rng.randint(-1, 12, 100)
        train, val = split_groups(numbers, 0.3, seed)
        assert sorted([*train, *val]) == list(range(100))
        assert not set(numbers[train][numbers[train] >= 0]) & set(numbers[val][numbers[val] >= 0])
        assert 30 <= len(val) < 30 + np.bincount(numbers[numbers >= 0]).max()


@pytest.mark.parametrize(("options", "message"), [
    (["--pattern", "(", "--name", "x"], "no regular expression"), (["--pattern", "a", "--name", "x"], "put brackets"),
    (["--pattern", "(z)", "--name", "x"], "no sample of .* is in a group"), (["--pattern", "(.)"], "needs --name NAME"),
    (["--name", "x"], "one of --pattern REGEX and --table FILE"), (["--name", "x", "--table", "no"], "no such file"),
    (["--name", "a/b", "--pattern", "(.)"], "use letters"), (["--name", "x", "--p", "0.5"], "--p means nothing to")])
def test_mistakes(index, options, message, capsys):
    assert main(["annotate", index.url, "--scheme", "groups", *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_damage_and_strangers(index, tmp_path):
    groups = make_groups(index, "tens", by_pattern("(.)[0-9]$"), {})
    path = tmp_path / "data" / "groups" / "tens.npy"
    np.save(path, np.roll(groups.numbers, 1))
    with pytest.raises(UserError, match="its numbers were changed"):
        Groups.load(index, "tens")
    path.write_bytes(b"no numbers")
    with pytest.raises(UserError, match="damaged"):
        Groups.load(index, "tens")
    with pytest.raises(UserError, match="too large to leave some on both sides"):
        split_groups(np.zeros(10, np.int64), 0.2, 0)
