"""Proves that a search is the trainer's own runs, chosen as it says; that kills, crashes and other workers change
nothing of what it finds; that the test set is never read; and that its files say what was found."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

import lacuna
from lacuna.basics.places import CONFIGS
from lacuna.tools import launches, tune
from lacuna.tools.cli import main
from lacuna.tools.trials.crew import work_through
from lacuna.tools.trials.ledger import Ledger
from lacuna.tools.trials.readiness import Readiness
from lacuna.tools.tune import findings
from lacuna.tools.tune.budget import Tune, contenders
from lacuna.tools.tune.search import SearchWork
from lacuna.trainer.config.files import load_config, read_body, read_yaml
from lacuna.trainer.methods import METHODS
from tests.helpers.crews import HereCrew, Quiet
from tests.helpers.launching import assert_equal_weights, environment
from tests.helpers.ray_nodes import two_nodes, wait_until_nobody_trains
from tests.helpers.small_runs import ALONG, body, make_data

SECTION = {"space": {"phases.0.lr": [0.05, 0.001, 3e38]}, "trials": 5, "halving": 2, "methods": {"an": {}, "en": {
    "method.momentum": {"range": [0.5, 0.9]}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tune")
    make_data(made, ALONG)
    base = body(made, "mine")
    base["data"]["test"] = {"url": str(made / "not there")}
    base["tune"] = SECTION
    (made / "mine.yaml").write_text(yaml.safe_dump(base))
    return made


class Killed(Exception):
    pass


def search(folder: Path, out: Path, crew: HereCrew, section: dict = SECTION) -> tuple[SearchWork, dict, bool]:
    config = load_config(str(folder / "mine.yaml"), [])
    blind = read_body(str(folder / "mine.yaml"))
    blind["data"] = {**blind["data"], "test": None}
    made = Tune(**section)
    rivals, ledger = contenders(blind, made, list(made.methods), "t"), Ledger(str(out))
    work = SearchWork(rivals, made, str(out), ledger)
    write = functools.partial(findings.write, work, "mine.yaml", {}, config)
    whole = work_through(work, ledger, crew, Quiet(), write)
    return work, write(), whole


@pytest.fixture(scope="module")
def undisturbed(folder) -> tuple[SearchWork, dict, list[str]]:
    crew = HereCrew()
    work, found, whole = search(folder, folder / "whole", crew)
    assert whole
    return work, found, crew.done


def timeless(found: dict) -> list[dict]:
    return [{k: v for k, v in t.items() if k not in ("seconds", "folder")} for t in found["trials"]]


def test_halving_and_what_is_written(undisturbed, folder):
    work, found, done = undisturbed
    assert work.parts == [4, 2, 1]
    assert [label for label in done if "@" not in label] == [found["best_of_methods"]["an"],
                                                            found["best_of_methods"]["en"]]
    for method in ("an", "en"):
        mine = [label for label in done if label.startswith(f"{method}-")]
        assert [sum(label.endswith(end) for label in mine) for end in ("@1", "@2")] == [5, 2]
    by_name = {trial["trial"]: trial for trial in found["trials"]}
    diverged = [trial for trial in found["trials"] if trial["settings"].get("phases.0.lr") == 3e38]
    assert diverged
    for trial in diverged:
        assert trial["status"] == "failed"
        assert "loss is" in trial["reason"] or "diverged" in trial["reason"]
    assert {trial["status"] for trial in found["trials"]} == {"failed", "dropped", "finished"}
    best = by_name[found["best"]]
    assert best["score"] == max(t["score"] for t in found["trials"] if t["status"] == "finished")
    with open(folder / "whole" / "trials.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [row["trial"] for row in rows] == list(by_name)
    assert rows[1]["phases.0.lr"] == str(found["trials"][1]["settings"]["phases.0.lr"])
    kept = {name for name in by_name if (folder / "whole/trials" / name / "checkpoints").exists()}
    assert kept == set(found["best_of_methods"].values())
    assert found["spaces"]["en"].keys() == {"phases.0.lr", "method.momentum"}


def test_the_best_trial_is_a_plain_training(undisturbed, folder):
    _, found, _ = undisturbed
    path = str(folder / "whole" / "best.yaml")
    with pytest.raises(lacuna.UserError, match="not there"):  # the config still has its test set
        lacuna.train(lacuna.load_config(path))
    config = lacuna.load_config(path, "data.test=null")
    assert config.name == f"mine-{found['best_method']}-best"
    plain = lacuna.train(config)
    best = next(trial for trial in found["trials"] if trial["trial"] == found["best"])
    assert plain.best_score == best["score"]
    assert_equal_weights(Path(plain.folder), Path(best["folder"]))


def test_left_before_any_job_and_crashed_in_any(undisturbed, folder, tmp_path):
    """As a kill between two jobs leaves it: nothing is done twice, and all is found as without it."""
    _, expected, order = undisturbed
    done: list[str] = []
    for _ in order:
        began: list[str] = []

        def before(job, began=began):
            if began:
                raise Killed
            began.append(job.label)

        crew = HereCrew(before)
        with contextlib.suppress(Killed):
            search(folder, tmp_path, crew)
        done += crew.done
    assert sorted(done) == sorted(order)
    _, found, whole = search(folder, tmp_path, HereCrew(before=pytest.fail))
    assert whole
    assert timeless(found) == timeless(expected)


def test_a_worker_that_dies_is_replaced_or_given_up(undisturbed, folder, tmp_path):
    deaths = {"an-0000@2": 1, "an-0001@2": 99}

    class Dying(HereCrew):
        def ended(self):
            job = self._next[0]
            if deaths.get(job.label, 0):
                deaths[job.label] -= 1
                return [(job, "out of memory")]
            return super().ended()

    section = {**SECTION, "trials": 2, "methods": {"an": {}}, "halving": 2}
    _, found, _ = search(folder, tmp_path, Dying(), section)
    assert [t["status"] for t in found["trials"]] == ["finished", "failed"]
    assert found["trials"][1]["reason"] == "its worker died 3 times: out of memory"


def test_hours_end_it_and_more_go_on(folder, tmp_path):
    section = {k: v for k, v in SECTION.items() if k != "trials"} | {"methods": {"an": {}}}
    _, found, whole = search(folder, tmp_path, HereCrew(), {**section, "hours": 1e-9})
    assert not whole
    assert found["best"] is None
    crew = HereCrew()
    work, found, whole = search(folder, tmp_path, crew, {**section, "hours": (work_seconds(tmp_path) + 4) / 3600})
    assert not whole
    assert found["best"] is not None
    assert len(found["trials"]) >= 1
    assert work.timer.seconds() >= 4


def work_seconds(out: Path) -> float:
    path = out / "elapsed.json"
    return json.loads(path.read_text())["seconds"] if path.exists() else 0.0


def test_sigkill_of_the_command(undisturbed, folder):
    """On Ray with two workers: killed while trials train, then given again."""
    _, expected, _ = undisturbed
    out = folder / "killed"
    words = ["tune", str(folder / "mine.yaml"), "--out", str(out), "--workers", "2"]
    launch = launches.Launch([sys.executable, "-m", "lacuna.tools.cli", *words], str(folder / "killed.out"),
                             environment(), str(folder))
    launch.wait_until(lambda: len(list(out.glob("outcomes/*.json"))) >= 3, "three outcomes")
    os.kill(launch.process.pid, signal.SIGKILL)
    launch.wait()
    wait_until_nobody_trains([launch.process.pid])
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("outcomes/*.json")}
    assert len(before) < 16
    assert main([*words[:-1], "1"]) == 0, "another number of workers finds the same"
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("outcomes/*.json")}
    assert before.items() <= after.items(), "what was finished is not touched"
    assert timeless(json.loads((out / "search.json").read_text())) == timeless(expected)
    assert "en-0000" in (out / "log.txt").read_text()


@pytest.mark.long
def test_two_nodes_of_a_cluster(undisturbed, folder):
    """Killed while trials train on both; then one node is lost, and what is left of the cluster finds the same."""
    out = folder / "nodes"
    with two_nodes(folder) as (address, nodes, variables):
        words = [sys.executable, "-m", "lacuna.tools.cli", "tune", str(folder / "mine.yaml"), "--out", str(out),
                 "--address", address]
        first = launches.Launch(words, str(folder / "nodes-1.out"), variables, str(folder))
        first.wait_until(lambda: len(list(out.glob("outcomes/*.json"))) >= 3, "three outcomes")
        first.signal_all(signal.SIGKILL)
        first.wait()
        wait_until_nobody_trains([node.process.pid for node in nodes])
        before = {path.name: path.stat().st_mtime_ns for path in out.glob("outcomes/*.json")}
        again = launches.Launch(words, str(folder / "nodes-2.out"), variables, str(folder))
        again.wait_until(lambda: len(list(out.glob("outcomes/*.json"))) > len(before), "another outcome")
        nodes[1].signal_all(signal.SIGKILL)
        assert again.wait() == 0, again.text()
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("outcomes/*.json")}
    assert before.items() <= after.items(), "what was finished is not touched"
    assert timeless(json.loads((out / "search.json").read_text())) == timeless(undisturbed[1])


def test_methods_that_do_not_fit_are_left_out(folder):
    blind = read_body(str(folder / "mine.yaml"))
    blind["data"] = {**blind["data"], "test": None}
    fit, unfit = tune.chosen_methods(["all"], blind, "t")
    assert {"an", "role", "en", "epr"} <= set(fit)
    assert "needs full labels" in unfit["bce"]
    assert "score maps" in unfit["en_scl"]
    assert "neighbors" in unfit["se_i"]
    assert "required" in unfit["ls"]
    assert set(fit) | set(unfit) == set(METHODS)


def test_shipped_spaces_are_legal_for_their_methods(folder):
    own = read_yaml(os.path.join(CONFIGS, "tune", "methods.yaml"), "shipped")
    blind = read_body(str(folder / "mine.yaml"))
    assert [c.method for c in contenders(blind, Tune(methods=own), list(own), "t")] == list(own)


@pytest.mark.parametrize(("words", "said"), [
    (["--methods", "rolle"], "did you mean 'role'?"),
    (["--methods", "bce"], "needs full labels"),
    (["data.val=null"], "data.val is not set"),
    (["data.train.url=/nowhere"], "dataset not there"),
    (["--trials", "0"], "--trials 0: must be more than 0"),
    (["--space", "nowhere.yaml"], "--space nowhere.yaml: cannot be read"),
    (["phases.0.lrr=1"], "did you mean 'lr'?"),
    (["--methods", "an", "method.gama=1"], "method 'en'"),
    (["--ranks", "0"], "--ranks 0: must be 1 or more"),
    (["--address", "127.0.0.1:1"], "no Ray cluster answers there"),
])
def test_mistakes(words, said, folder, capsys):
    assert main(["tune", str(folder / "mine.yaml"), "--out", str(folder / "mistakes"), *words]) == 2
    assert said in capsys.readouterr().err


def test_another_length_is_another_trial(folder):
    ready, path = Readiness(), str(folder / "mine.yaml")
    keys = [ready.key(load_config(path, ["data.test=null", f"phases.0.epochs={epochs}"])) for epochs in (4, 4, 5)]
    assert keys[0] == keys[1] != keys[2]


def test_another_search_in_the_same_folder_is_refused(undisturbed, folder):
    with pytest.raises(lacuna.UserError, match="with other settings or data"):
        search(folder, folder / "whole", HereCrew(), {**SECTION, "seed": 5})


def test_the_report(undisturbed, folder, browser, capsys):
    """Every trial, the best curves and each setting, in a page without errors."""
    _, found, _ = undisturbed
    assert main(["report", str(folder / "whole"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in data["runs"]] == [*(
        name for name in found["best_of_methods"].values() if name != found["best"]), found["best"]]
    shown = data["searches"][0]
    assert [t["trial"] for t in shown["trials"]] == [t["trial"] for t in found["trials"]]
    rates = next(s for s in shown["settings"] if (s["method"], s["key"]) == ("en", "phases.0.lr"))
    assert rates["axis"] == "log10 of phases.0.lr"
    assert sum(len(cloud["points"]) for cloud in rates["clouds"]) == sum(
        t["method"] == "en" and t["score"] is not None and bool(t["settings"]) for t in found["trials"])
    assert shown["curves"][0]["points"][0] == [1, next(t for t in found["trials"]
                                                       if t["trial"] == shown["curves"][0]["name"])["curve"][0]]
    assert main(["report", str(folder / "whole")]) == 0
    browser.open((folder / "whole" / "report.html").as_uri(), "document.body.dataset.ready === 'yes'")
    assert browser.errors == []
    assert browser.evaluate("document.querySelectorAll('#search svg').length") >= 3
    text = browser.evaluate("document.querySelector('#search').textContent")
    assert any(t["reason"] and t["reason"] in text for t in found["trials"])
