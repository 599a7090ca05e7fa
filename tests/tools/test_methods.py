"""Proves that `lacuna methods` lists every method with its paper, state, needs and documented settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lacuna.tools.cli import main
from lacuna.trainer.methods import METHODS

DATASETS = ("voc12", "coco14", "nus", "cub")  # of the page's column of published numbers


def entries(capsys):
    assert main(["methods", "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


def test_every_method_is_described(capsys):
    found = entries(capsys)
    assert list(found) == list(METHODS)
    for name, entry in found.items():
        assert entry["paper"], name
        assert set(entry["bytes_per_sample"]) == {"80", "1000", "9600"}
        assert bool(entry["state"]) == (entry["bytes_per_sample"]["80"] > 0)
        for setting in entry["settings"]:
            assert setting["about"], f"{name}.{setting['name']} has no docstring"


def test_what_is_said_about_some(capsys):
    found = entries(capsys)
    assert found["csl"]["state"] == []
    assert {s["name"]: s["default"] for s in found["csl"]["settings"]}["gamma_unknown"] == 2.0
    assert any("global batch" in need for need in found["ll_r"]["needs"])
    assert found["ls"]["needs"] == ["the setting temperature"]
    assert found["role"]["bytes_per_sample"]["1000"] >= 12_000  # φ and its two moments
    assert found["bce"]["needs"] == ["full labels"]
    assert found["an"]["reported"]["coco14"]["cole:coco14_an_linear"] == 62.3


def test_text_and_unknown_names(capsys):
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert all(name in rows for name in METHODS)
    assert "Cole et al. 2021" in rows["role"]
    assert "968  whole-batch, state" in rows["role"]
    assert rows["an"].endswith("–  nothing")
    assert max(map(len, text.splitlines())) <= 120
    assert main(["methods", "ls"]) == 0
    text = capsys.readouterr().out
    assert "temperature (required)" in text
    assert "soft_exposure:openimages_v5_ls 7" in text
    assert main(["methods", *METHODS]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name}\n" in "\n" + text for name in METHODS)
    assert max(map(len, text.splitlines())) <= 120
    assert main(["methods", "csll"]) == 2
    assert "did you mean 'csl'" in capsys.readouterr().err


def test_methods_by_family_and_by_what_they_need(capsys):
    def chosen(*words: str) -> list[str]:
        assert main(["methods", "--json", *words]) == 0
        return [entry["name"] for entry in json.loads(capsys.readouterr().out)]

    assert chosen("--family", "cole") == ["bce", "bce_ls", "iu", "iun", "an", "an_ls", "wan", "epr", "pr"]
    assert set(chosen("--family", "verelst", "--needs", "images")) == {"an_scl", "en_scl", "ep_scl", "epr_scl"}
    assert set(chosen("--needs", "neighbors")) == {"se_i", "se_l", "se"}
    assert chosen("ls", "an", "--needs", "nothing") == ["an"], "ls has a setting without a default"
    for words, message in ((["--family", "colle"], "there is no such family; there are: cole"),
                           (["--needs", "time"], "write one of full-labels")):
        assert main(["methods", *words]) == 2
        assert message in capsys.readouterr().err


def test_the_methods_page_has_every_method_and_every_paper_of_the_fields_list(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text()
    ours, papers = page.split("## The field's list")
    for name, entry in entries(capsys).items():
        row = next(line for line in ours.splitlines() if line.startswith(f"| `{name}` |"))
        shown = row.split("|")[2].strip()
        for dataset, text in zip(DATASETS, shown.split(" / ") if " / " in shown else ["–"] * 4, strict=True):
            legal = [f"{value:g}" for value in entry["reported"].get(dataset, {}).values() if isinstance(value, float)]
            assert text in (legal or ["–"]), f"{name} on {dataset}: the page says {text}, tables {legal}"
        assert f"{entry['bytes_per_sample']['9600']:,}" in row or not entry["state"]
        assert all(need.partition(" (")[0] in row for need in entry["needs"]), f"{name} needs {entry['needs']}"
    rows = [line for line in papers.splitlines() if line.startswith("| [")]
    assert len(rows) == 45
    named = {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row.rsplit("|", 2)[1])}
    assert {"role", "ll_cp", "em_apl", "lac", "ignore", "crisp", "mime", "aevlp", "gr", "hill", "en", "vlpl"} <= named
    assert named <= METHODS.keys(), "a row names a method that is not there"
