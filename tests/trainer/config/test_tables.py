"""A row of a table is its bases, the table's defaults and its own settings, found by path or by name; mistakes are
named with what is legal."""

from __future__ import annotations

import pytest
import yaml

from lacuna.basics.errors import UserError
from lacuna.trainer.config.files import load_config, merge
from lacuna.trainer.config.reported import as_text

BASE = {"name": "data", "data": {"train": {"url": "/a"}, "image_size": 64}, "method": {"name": "an_ls"},
        "phases": [{"name": "a", "epochs": 1, "batch": 8, "lr": 0.1}]}
TABLE = {"about": "A table.", "source": "test mAP of nobody", "base": "base.yaml",
         "defaults": {"data": {"image_size": 32}, "train": {"keep": 3}},
         "rows": {"plain": {"reported": 50.5},
                  "weighted": {"method": {"smoothing": 0.2}, "train": {"keep": 1}, "note": "Why."},
                  "other": {"base": ["base.yaml", "more.yaml"], "method": {"name": "an"},
                            "reported": {"mAP": 1.0, "groups": [1.0, 2.5]}}}}


@pytest.fixture
def write(tmp_path):
    def write(name: str, body: dict) -> str:
        (tmp_path / name).write_text(yaml.safe_dump(body, sort_keys=False))
        return str(tmp_path / name)

    write("base.yaml", BASE)
    write("more.yaml", {"data": {"image_size": 128, "workers": 2}})
    return write


def test_a_row_wins_over_defaults_and_these_over_bases(write):
    path = write("t.yaml", TABLE)
    plain, weighted, other = (load_config(f"{path}:{row}", []) for row in TABLE["rows"])
    assert (plain.name, plain.data.image_size, plain.train.keep, plain.method) == ("plain", 32, 3, {"name": "an_ls"})
    assert (weighted.train.keep, weighted.method) == (1, {"name": "an_ls", "smoothing": 0.2})
    assert (other.data.image_size, other.data.workers, other.method) == (32, 2, {"name": "an"})
    assert load_config(f"{path}:plain", ["name=mine", "data.image_size=16"]).folder == "runs/mine"


def test_the_same_settings_in_one_file_are_the_same_config(write):
    body = merge(merge(BASE, TABLE["defaults"]), {"name": "weighted", "method": {"smoothing": 0.2},
                                                  "train": {"keep": 1}})
    assert load_config(write("whole.yaml", body), []) == load_config(write("t.yaml", TABLE) + ":weighted", [])


def test_rows_and_what_ships_are_bases_too(write):
    write("t.yaml", TABLE)
    assert load_config(write("own.yaml", {"base": "t.yaml:weighted", "name": "own"}), []).train.keep == 1
    own = load_config(write("shipped.yaml", {"base": "cole:coco14_an_linear", "name": "own"}), [])
    assert own.data.train.url == "shards/coco14/train"
    assert own == load_config("cole:coco14_an_linear", ["name=own"])
    loop = {**TABLE, "rows": {"a": {"base": "loop.yaml:b"}, "b": {"base": "loop.yaml:a"}}}
    with pytest.raises(UserError, match="leads back to itself"):
        load_config(write("loop.yaml", loop) + ":a", [])


def test_names_work_from_anywhere_and_files_come_first(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cole").mkdir()  # a folder of that name is no config
    assert load_config("cole:coco14_an_linear", []).name == "coco14_an_linear"
    assert load_config("demo", []).name == "demo-gr"
    write("demo", {**BASE, "name": "a file"})
    write("with:colon.yaml", {**BASE, "name": "a colon"})
    assert load_config("demo", []).name == "a file"
    assert load_config("with:colon.yaml", []).name == "a colon"


def test_mistakes_in_names(write):
    path = write("t.yaml", TABLE)
    many = write("many.yaml", {**TABLE, "rows": {f"r{i}": {} for i in range(99)}})
    cases = {
        path: f"t.yaml: a table of 3 rows; name one, as {path}:plain. Rows: plain, weighted, other.",
        many: "r23 and 75 more (`lacuna configs",
        f"{path}:plian": "no row 'plian'; did you mean 'plain'?",
        f"{path}:zzz": "no row 'zzz'; rows: plain, weighted, other.",
        write("single.yaml", BASE) + ":plain": "is no table, it has no row 'plain'",
        "coel:coco14_an_linear": "neither a file nor a config that ships; did you mean 'cole'?",
        "cole:coco14_an_lineer": "did you mean 'coco14_an_linear'?",
        "cole": "a table of 80 rows",
        "nowhere/cole.yaml:x": "`lacuna configs` lists what ships",
    }
    for source, message in cases.items():
        with pytest.raises(UserError) as caught:
            load_config(source, [])
        assert message in str(caught.value), source


def test_mistakes_in_tables(write):
    row = {"reported": 1.0}
    cases = {
        "unknown key 'defualts'; did you mean 'defaults'?": {**TABLE, "defualts": {}},
        "key 'about' is required": {"rows": {"a": {}}},
        "rows: Dictionary should have at least 1 item": {**TABLE, "rows": {}},
        "rows.a = 3": {**TABLE, "rows": {"a": 3}},
        "row a: unknown key 'reportd'; did you mean 'reported'?": {**TABLE, "rows": {"a": {"reportd": 1}}},
        "row a: unknown key 'modle'; did you mean 'model'?": {**TABLE, "rows": {"a": {"modle": {}}}},
        "row a: unknown key 'name'; a run is named like its row": {**TABLE, "rows": {"a": {"name": "b"}}},
        "defaults: unknown key 'reported'": {**TABLE, "defaults": row},
        "row a: reported": {**TABLE, "rows": {"a": {"reported": "much"}}},
        "row 'a/b': a run's folder is named like it": {**TABLE, "rows": {"a/b": row}},
        "key 'source' does not say whose it is": {**TABLE, "source": "", "rows": {"a": row}},
        "unknown key 'data.imgsize'; did you mean 'image_size'?": {**TABLE, "rows": {"a": {"data": {"imgsize": 1}}}},
        "a: base nowhere.yaml": {**TABLE, "rows": {"a": {"base": "nowhere.yaml"}}},
    }
    for number, (message, body) in enumerate(cases.items()):
        with pytest.raises(UserError) as caught:
            load_config(write(f"{number}.yaml", body) + ":a", [])
        assert message in str(caught.value)
        assert f"{number}.yaml" in str(caught.value)


def test_numbers_as_text():
    assert (as_text(62.3), as_text(90.0)) == ("62.3", "90")
    assert as_text({"mAP": 1.0, "groups": [1.0, 2.5]}) == "mAP 1, groups 1 / 2.5"
