"""Proves that `lacuna table` trains rows × seeds by the trainer itself, searches without the test set where the paper
searched, goes on after a kill, and says what is missing and why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

import lacuna
from lacuna.tools.cli import main
from lacuna.tools.table.rows import RowWork
from lacuna.tools.table.work import TableWork
from lacuna.tools.trials.crew import work_through
from lacuna.tools.trials.job import Outcome
from lacuna.tools.trials.ledger import Ledger
from lacuna.trainer.config.files import load_config, read_body, read_table
from lacuna.trainer.config.tables import pick, searched
from tests.helpers.crews import HereCrew, Quiet
from tests.helpers.small_runs import ALONG, body, make_data


@pytest.fixture(scope="module")
def table(tmp_path_factory, digit_shards) -> Path:
    folder = tmp_path_factory.mktemp("table")
    make_data(folder, ALONG)
    base = body(folder, "unused")
    base["data"]["test"] = {"url": str(folder / "test")}
    for key in ("name", "method"):
        del base[key]
    base["phases"][0]["epochs"] = 2
    rows = {"an_found": {"method": {"name": "an"}, "reported": 50.0},
            "en_plain": {"method": {"name": "en"}, "reported": {"validation mAP": 40.0, "mAP": 41.0, "strange": 1.0}},
            "away": {"method": {"name": "an"}, "data": {"train": {"url": str(folder / "nowhere")}}},
            "heavy": {"method": {"name": "an"}, "note": "from memory",
                      "data": {name: {"url": str(digit_shards / name), "labels": "labels"}
                               for name in ("train", "val", "test")},
                      "model": {"backbone": "lacuna:tiny", "weights": str(folder / "no.safetensors")}}}
    whole = {"about": "Ours.\nMore.", "source": "test mAP by us", "defaults": base, "rows": rows,
             "search": {"*_found": {"phases.0.lr": ["1e-4", 0.05], "phases.0.batch": [16]}}}
    (folder / "paper.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    return folder / "paper.yaml"


def work_of(table: Path, out: Path, names: list[str], seeds: range) -> tuple[TableWork, Ledger]:
    whole = read_table(str(table))
    assert whole
    rows = [RowWork(name, pick(whole, name, "t").row, read_body(f"{table}:{name}"), searched(whole, name), name)
            for name in names]
    ledger = Ledger(str(out))
    return TableWork(rows, str(out), seeds, ledger), ledger


class Killed(Exception):
    pass


def test_rows_seeds_search_and_a_kill(table, tmp_path):
    """Left before every job in turn: what was done is never done again, and numbers are those of plain trainings."""
    hidden = table.parent / "test"
    crews = []
    for _ in range(20):
        began = []

        def before(job, began=began):
            if job.name.rpartition(".")[2].startswith("try"):
                assert job.config.data.test is None
                hidden.rename(table.parent / "hidden")  # not even there while a search goes on
                (table.parent / "hidden").rename(hidden)
            if began:
                raise Killed
            began.append(job)

        work, ledger = work_of(table, tmp_path, ["an_found", "en_plain"], range(2))
        crews.append(HereCrew(before))
        try:
            assert work_through(work, ledger, crews[-1], Quiet())
            break
        except Killed:
            continue
    done = [label for crew in crews for label in crew.done]
    assert sorted(done) == sorted(["an_found.try-00", "an_found.try-01", "an_found.seed-0", "an_found.seed-1",
                                   "en_plain.seed-0", "en_plain.seed-1"])
    found, plain = (row.as_dict(range(2)) for row in work.rows)
    assert found["chosen"] == {"phases.0.lr": 0.05, "phases.0.batch": 16}
    assert found["missing"] is None
    for seed in (0, 1):
        config = load_config(f"{table}:an_found", [f"name=alone-{seed}", "phases.0.lr=0.05", f"seed={seed}",
                                                   f"run_folder={tmp_path}"])
        alone = lacuna.train(config)
        assert found["ours"]["mAP"]["each"][seed] == alone.test["map_skip_empty"]
        assert work.rows[0].outcomes[seed].results["val"] == alone.val
    assert found["difference"] == {"mAP": pytest.approx(found["ours"]["mAP"]["mean"] - 50)}
    assert set(plain["ours"]) == {"validation mAP", "mAP"}
    # The losers' weights are gone, their curves are not.
    assert not (tmp_path / "runs/an_found/try-00/checkpoints").exists()
    assert (tmp_path / "runs/an_found/try-00/metrics.jsonl").exists()
    assert (tmp_path / "runs/an_found/try-01/checkpoints").exists()


def test_a_setting_that_diverged_is_not_chosen(table):
    """Also if its first epoch was the best of all."""
    whole = read_table(str(table))
    assert whole
    row = RowWork("an_found", pick(whole, "an_found", "t").row, {}, searched(whole, "an_found"), "t")
    row.tried = {0: Outcome("finished", 40.0), 1: Outcome("failed", 60.0, reason="the loss is nan")}
    row.choose()
    assert (row.chosen, row.missing) == (0, None)
    row.tried[0], row.chosen = Outcome("failed", reason="no room"), None
    row.choose()
    assert row.chosen is None
    assert row.missing == "every setting of the search failed; the first: no room"


def test_the_command(table, tmp_path, capsys):
    """A second call trains nothing, a pattern takes part of it, and what is not there is named."""
    words = ["table", str(table), "--rows", "en_*", "away", "heavy", "--out", str(tmp_path), "--workers", "0"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "| en_plain | validation mAP " in text
    assert "strange 1" in text
    assert "- away: dataset not there: " in text
    assert "- heavy: weights not there: " in text
    assert "- heavy: from memory" in text
    assert (tmp_path / "table.md").read_text() + "\n" == text
    page = (tmp_path / "table.html").read_text()
    assert "<td>en_plain</td>" in page
    assert main([*words, "--json", "--show"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"][0]["seeds"] == [0]
    shutil.rmtree(tmp_path / "runs")
    assert main([*words, "--json"]) == 0, "nothing is trained again"
    assert json.loads(capsys.readouterr().out) == again
    assert not (tmp_path / "runs").exists()
    assert main([*words, "--seeds", "2", "--show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["missing"] == "not trained yet: seeds 1"
    assert main([*words, "phases.0.lr=0.1"]) == 2
    assert "with other settings or data" in capsys.readouterr().err


def test_mistakes(table, tmp_path, capsys):
    cases = {
        ("table", str(table), "--rows", "an_fuond"): "--rows an_fuond: no row of",
        ("table", str(table), "--rows", "en_*", "train.kep=1"): "did you mean 'keep'?",
        ("table", str(table), "--seeds", "0"): "--seeds 0: must be 1 or more",
        ("table", "coel"): "did you mean 'cole'?",
        ("table", "demo"): "not a table, it has no rows",
        ("table", str(table), "--workers", "-1"): "--workers -1: must be 0 or more",
    }
    for words, message in cases.items():
        assert main([*words, "--out", str(tmp_path)]) == 2, words
        assert message in capsys.readouterr().err
    whole = yaml.safe_load(table.read_text())
    for search, message in (({"nn_*": {}}, "search 'nn_*': no row fits"),
                            ({"*": {"phases.0.lr": {"log": [1, 2]}}}, "give a list of choices"),
                            ({"*": {"phases.0.lrr": [1]}}, "did you mean 'lr'?"),
                            ({"*": {"phases.7.lr": [1]}}, "phases is a list; use an index 0..0")):
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump({**whole, "search": search}))
        assert main(["table", str(other), "--rows", "en_*", "--out", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
