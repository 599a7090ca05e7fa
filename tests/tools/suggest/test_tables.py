"""Proves that suggest and explore give the same from a model's score table as from a pass of that model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lacuna.tools.cli import main
from tests.helpers.exploring import desk_of

_ASKED = ("--precision", "0.3", "--delta", "0.4", "--pool", "--workers", "1", "--json")


@pytest.fixture(scope="module")
def tables(trained, tmp_path_factory) -> dict[str, str]:
    """split → the scores of the single-label run, exactly."""
    folder = tmp_path_factory.mktemp("tables")
    for split in ("train", "val"):
        assert main(["scores", trained.scl, "--shards", str(trained.data / split), "--out", str(folder / split),
                     "--dtype", "float32", "--workers", "1"]) == 0
    return {split: str(folder / split) for split in ("train", "val")}


def test_suggestions_from_tables_equal_those_of_a_pass(trained, tables, tmp_path, capsys):
    facts = []
    for name, more in (("pass", ()), ("table", ("--scores", tables["train"], "--val-scores", tables["val"]))):
        assert main(["suggest", trained.scl, "--out", str(tmp_path / f"{name}.csv"), *_ASKED, *more]) == 0
        facts.append(json.loads(capsys.readouterr().out))
    assert facts[0]["suggestions"] == facts[1]["suggestions"] > 10
    assert (tmp_path / "pass.csv").read_text() == (tmp_path / "table.csv").read_text()


def test_explore_shows_the_beliefs_of_a_table(trained, tables):
    desk = desk_of(trained.scl, scores=tables["train"])
    scores, rows = desk.believed.get(0)
    assert "table" in desk.columns.facts["origin"]
    assert rows.tolist() == list(range(len(rows)))
    assert scores.dtype == np.float32
    own, _ = desk_of(trained.scl).believed.get(0)
    assert not np.allclose(scores, own, atol=1e-3), "this run remembers running averages, the table does not"


def test_mistakes(trained, tables, tmp_path, capsys):
    out = ["suggest", trained.scl, "--out", str(tmp_path / "s.csv"), "--workers", "1"]
    assert main([*out, "--val-scores", tables["val"]]) == 2
    assert "--scores TABLE" in capsys.readouterr().err
    assert main([*out, "--scores", tables["train"]]) == 2
    said = capsys.readouterr().err
    assert "--val-scores" in said
    assert "another" in said or "was imported for the shard index" in said
    assert main([*out, "--scores", tables["val"], "--val-scores", tables["val"]]) == 2
    assert "--scores = " in capsys.readouterr().err
