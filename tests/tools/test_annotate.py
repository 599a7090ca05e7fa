"""Proves that `lacuna annotate` writes what it prints, for people and for machines, and names bad options."""

from __future__ import annotations

import json
import shutil

import pytest

from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.subsets import Subset
from lacuna.tools.cli import main


@pytest.fixture
def data(digit_shards, tmp_path) -> str:
    return shutil.copytree(digit_shards / "train", tmp_path / "train").as_posix()


def made(capsys, *argv):
    assert main(["annotate", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["made"]


def test_split_then_single_positive(data, capsys):
    train, val = made(capsys, data, "--scheme", "val_split")
    assert (train["name"], train["rows"], val["name"], val["rows"]) == ("train", 328, "val", 82)
    (single,) = made(capsys, data, "--scheme", "single_positive", "--from", "labels", "--name", "single")
    assert (single["positives"], single["negatives"]) == (410, 0)
    index = ShardIndex.load(data)
    assert Sidecar.load(index, "single").fingerprint == single["fingerprint"]
    assert Subset.load(index, "val").fingerprint == val["fingerprint"]
    listed = {(thing["kind"], thing["name"]) for thing in made(capsys, data, "--list")}
    assert listed == {("sidecar", "labels"), ("sidecar", "single"), ("subset", "train"), ("subset", "val")}


def test_every_scheme_runs_and_prints_its_fingerprint(data, capsys, tmp_path):
    (tmp_path / "parents.csv").write_text("0,round\n8,round\n")
    options = {
        "fpc": ["--per-class", "5"], "rpa": ["--p", "0.9"], "image_fraction": ["--fraction", "0.5"],
        "positive_fraction": ["--fraction", "0.2", "--negatives", "dataset"],
        "graph": ["--parents", str(tmp_path / "parents.csv"), "--seed", "4"],
    }
    for scheme, flags in options.items():
        assert main(["annotate", data, "--scheme", scheme, "--name", f"by_{scheme}", *flags]) == 0
        sidecar = Sidecar.load(ShardIndex.load(data), f"by_{scheme}")
        printed = capsys.readouterr().out
        assert f"sidecar by_{scheme}: 410 rows" in printed
        assert sidecar.fingerprint in printed
    assert Subset.load(ShardIndex.load(data), "by_image_fraction").samples == 205


@pytest.mark.parametrize(("flags", "message"), [
    (["--scheme", "sngle"], "--scheme 'sngle': legal are val_split, groups, single_positive"),
    ([], "--scheme None: legal are"),
    (["--scheme", "rpa"], "--name: give the new sidecar a name"),
    (["--scheme", "rpa", "--name", "x", "--per-class", "3"], "--per-class means nothing to --scheme rpa; it takes"),
    (["--scheme", "rpa", "--name", "x", "--from", "truth"], "no label sidecar named 'truth'"),
    (["--scheme", "rpa", "--name", "x", "--within", "train"], "no subset named 'train'"),
    (["--scheme", "rpa", "--name", "a/b"], "sidecar name 'a/b'"),
    (["--scheme", "val_split", "--fraction", "1"], "--fraction 1.0"),
])
def test_bad_options_are_named(data, capsys, flags, message):
    assert main(["annotate", data, *flags]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_replaced_unless_asked(data, capsys):
    argv = ["annotate", data, "--scheme", "image_fraction", "--name", "half", "--fraction", "0.5"]
    assert main(argv) == 0
    assert main(argv) == 2
    assert "'half' exists already" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0
