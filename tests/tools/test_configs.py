"""Proves that `lacuna configs` lists everything that ships, and prints a table's numbers and a row that trains."""

from __future__ import annotations

import json

import yaml

from lacuna.tools.cli import main
from lacuna.trainer.config.files import load_config, shipped
from lacuna.trainer.config.sections import parse_config


def printed(capsys, *words: str) -> str:
    assert main(["configs", *words]) == 0
    return capsys.readouterr().out


def test_the_list(capsys):
    found = json.loads(printed(capsys, "--json"))
    assert sorted(name for kind in found.values() for name in kind) == sorted(shipped())
    assert found["tables"]["cole"]["rows"] == 80
    assert set(found["own"]) == {"demo", "own_images"}
    text = printed(capsys)
    assert all(f"\n  {name} " in text for name in shipped())
    assert max(map(len, text.splitlines())) <= 120


def test_a_table(capsys):
    body = json.loads(printed(capsys, "cole", "--json"))
    assert body["rows"]["coco14_an_linear"] == {"reported": 62.3}
    text = printed(capsys, "csl")
    assert "Hardware: 8 GPUs" in text
    assert "test mAP reported by Ben-Baruch" in text
    line = next(line for line in text.splitlines() if line.startswith("  openimages_v6_selective "))
    assert "mAP(C) 86.72, mAP(O) 93.57" in line
    assert max(map(len, text.splitlines())) <= 120


def test_what_is_printed_is_the_config(capsys, tmp_path):
    expected = load_config("cole:coco14_an_linear", [])
    assert parse_config(yaml.safe_load(printed(capsys, "cole:coco14_an_linear")), "printed") == expected
    assert parse_config(json.loads(printed(capsys, "cole:coco14_an_linear", "--json")), "printed") == expected
    (tmp_path / "own.yaml").write_text("base: cole:coco14_an_linear\nname: own\n")
    assert yaml.safe_load(printed(capsys, str(tmp_path / "own.yaml")))["name"] == "own"
    assert yaml.safe_load(printed(capsys, "base/coco14"))["data"]["test"]["url"] == "shards/coco14/test"
    shown = printed(capsys, "own_images")
    assert shown.startswith("# Your own folder of images")
    assert yaml.safe_load(shown)["name"] == "own"


def test_mistakes(capsys):
    assert main(["configs", "coel"]) == 2
    assert "did you mean 'cole'?" in capsys.readouterr().err
    assert main(["configs", "cole:coco14_an_lineer"]) == 2
    assert "did you mean 'coco14_an_linear'?" in capsys.readouterr().err
