"""Proves that `lacuna report` shows what the runs hold, computed as a naive reader would, in a page without errors."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from sklearn.metrics import average_precision_score

from lacuna import state_store
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store import Field
from lacuna.tools.cli import main
from lacuna.tools.report.beliefs import probabilities
from lacuna.tools.report.page import embedded, render
from lacuna.tools.report.recorded_run import curves
from tests.helpers.launching import last_checkpoint, metrics
from tests.helpers.naive_scores import naive_scores


@pytest.fixture(scope="module")
def data(trained) -> dict:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["report", trained.scl, "--oracle", trained.full, "--json"]) == 0
    return json.loads(out.getvalue())


def test_curves_are_the_metrics(trained, data):
    for run, folder in zip(data["runs"], (trained.scl, trained.full), strict=True):
        lines = metrics(Path(folder), "train")
        assert run["curves"]["loss"] == [[line["step"], line["loss"]] for line in lines]
        maps = [[line["step"], line["val_map_skip_empty"]] for line in metrics(Path(folder), "epoch")]
        assert run["curves"]["val_map_skip_empty"] == maps
        assert run["scores"]["test"] == json.loads(Path(folder, "results.json").read_text())["test"]["map_skip_empty"]
    read = data["runs"][0]["curves"]["state_bytes_read"]
    steps = np.diff([0, *(step for step, _ in read)])
    last = metrics(Path(trained.scl), "train")[-1]["state_bytes_read"]
    assert sum(step * rate for step, (_, rate) in zip(steps, read, strict=True)) == pytest.approx(last)


def test_growing_counters_survive_a_resume():
    """A resumed launch counts from 0: what it read before its first report is not negative."""
    lines = [{"kind": "train", "step": step, "state_bytes_read": value, "loss": float("nan")}
             for step, value in ((10, 100), (20, 300), (30, 50))]
    assert curves(lines)["state_bytes_read"] == [[10, 10.0], [20, 20.0], [30, 5.0]]
    assert curves(lines)["loss"] == [[10, None], [20, None], [30, None]]
    many = [{"kind": "train", "step": step, "loss": 1.0} for step in range(5000)]
    thin = curves(many)["loss"]
    assert len(thin) < 900
    assert thin[-1][0] == 4999


def test_what_a_paper_reports_for_a_run_that_is_named_like_its_row(trained, tmp_path, capsys):
    body = yaml.safe_load(Path(trained.full, "config.yaml").read_text())
    shutil.copytree(trained.full, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "trace"))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({**body, "name": "coco14_bce_linear"}))
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]["reported"]
    assert (found["config"], found["numbers"]) == ("cole:coco14_bce_linear", "70")


def test_comparison(trained, data):
    """Gap closed, AP of every class and the annotated part, and exactly the keys in which the configs differ."""
    scores = [run["scores"]["test"] for run in data["runs"]]
    assert [row["closed"] for row in data["gap"]["rows"]] == [0.0, 1.0], "the first run is the baseline"
    assert [row["score"] for row in data["gap"]["rows"]] == scores
    with open(Path(trained.full, "test_classes.csv"), encoding="utf-8") as f:
        expected = [(row["name"], float(row["ap"])) for row in csv.DictReader(f)]
    assert [(row["name"], row["ap"][1]) for row in data["classes"]["rows"]] == expected
    index = ShardIndex.load(str(trained.data / "train"))
    single = Sidecar.load(index, "single").positives / index.samples
    for row, fraction in zip(data["classes"]["rows"], single, strict=True):
        assert row["annotated"] == [pytest.approx(fraction), 1.0]
    assert {row[0] for row in data["config"]["rows"]} == {"name", "data.train.labels", "method.name", "method.gamma"}
    assert {(a["run"], a["what"]) for a in data["absent"]} >= {("full", "heatmaps over epochs")}


def test_beliefs_are_those_of_the_store(trained, data):
    """Every kept snapshot against a plain loop over all rows, with scikit-learn's average precision."""
    store, index = state_store.open(trained.scl + "/state"), ShardIndex.load(str(trained.data / "train"))
    known, truth = (np.concatenate([Sidecar.load(index, name).labels(s).dense(10) for s in range(len(index.shards))])
                    for name in ("single", "labels"))
    beliefs = data["runs"][0]["beliefs"]
    assert beliefs["samples"] == index.samples
    assert [m["step"] for m in beliefs["moments"]] == [int(e.name[5:]) for e in store.snapshots()]
    assert len(beliefs["moments"]) == 3
    for moment, entry in zip(beliefs["moments"], store.snapshots(), strict=True):
        reader = store.reader(entry.name)
        values = np.concatenate([reader.read_shard("score", s) for s in range(len(index.shards))]) / 255
        hidden = values[(known == UNKNOWN) & (truth == POSITIVE)]
        counts = np.zeros(20)
        for value in hidden.astype(np.float32):
            counts[min(int(np.floor(value * np.float32(20))), 19)] += 1
        np.testing.assert_allclose(moment["unobserved_positive"], counts / len(hidden), atol=0.02)
        assert sum(moment["top1"]) == pytest.approx(1)
        assert moment["recovery"] == pytest.approx(100 * average_precision_score(truth == 1, values), abs=1e-4)
        one = [average_precision_score(truth[k, c] == 1, values[k, c]) for c in range(10)
               for k in [known[:, c] == UNKNOWN]]
        assert moment["recovery_unobserved"] == pytest.approx(100 * np.mean(one), abs=1e-4)
    np.testing.assert_allclose([f["estimated"] for f in beliefs["frequency"]], values.mean(0), atol=1e-6)
    np.testing.assert_allclose([f["true"] for f in beliefs["frequency"]], (truth == 1).mean(0))
    assert data["runs"][1]["beliefs"] is None


def test_fields_are_read_as_probabilities():
    """Running scores are probabilities; ROLE's φ and a field of logits are not."""
    score = Field("score", (2,), "uint8", range=(0, 1))
    np.testing.assert_allclose(probabilities(score, np.array([[0, 255]], np.uint8)), [[0, 1]])
    logits = Field("score", (3,), "uint16", range=(-64, 64))
    found = probabilities(logits, logits.encode(np.array([[-64.0, 0.0, 1.0]])))
    np.testing.assert_allclose(found, [[0, 0.5, 1 / (1 + np.exp(-1))]], atol=1e-3)
    phi = probabilities(Field("phi", (2,), "float32"), np.array([[-1000.0, 2.0]], np.float32))
    np.testing.assert_allclose(phi, [[0, 1 / (1 + np.exp(-2))]], atol=1e-6)


def test_scores_of_checkpoints(trained, capsys):
    """--score looks at what a stateless run's kept checkpoints say, equal to a plain loop over the images."""
    assert main(["report", trained.full, "--json", "--score", "--samples", "60"]) == 0
    beliefs = json.loads(capsys.readouterr().out)["runs"][0]["beliefs"]
    assert len(beliefs["moments"]) == 3
    source = ShardSource.load(str(trained.data / "train"), "labels", None)
    scores = np.concatenate([naive_scores(trained.full, last_checkpoint(Path(trained.full)), source.open(shard))
                             for shard in (0, 12)])
    np.testing.assert_allclose([f["estimated"] for f in beliefs["frequency"]], scores.mean(0), atol=1e-6)
    assert beliefs["samples"] == len(scores), "whole shards, as many as it takes"
    top = np.histogram(scores.max(1), 20, (0, 1))[0] / len(scores)
    np.testing.assert_allclose(beliefs["moments"][-1]["top1"], top)


def test_strips_show_every_snapshot(trained, data):
    strips = data["runs"][0]["strips"]
    assert strips["steps"] == [m["step"] for m in data["runs"][0]["beliefs"]["moments"]]
    assert len(strips["images"]) == 6
    notes = {row["note"] for image in strips["images"] for row in image["rows"]}
    assert {"annotated", "hidden positive"} <= notes
    assert all(cell["picture"].startswith("data:image/jpeg") for image in strips["images"] for row in image["rows"]
               for cell in row["cells"])


def test_page_on_a_phone(trained, tmp_path, browser):
    """Nothing is wider than the screen, no letter of an axis is cut off, and no chart's letters are too small."""
    out = tmp_path / "report.html"
    assert main(["report", trained.scl, "--oracle", trained.full, "--out", str(out)]) == 0
    for width in (390, 1280):
        browser.resize(width, 844)
        browser.open(out.as_uri(), "document.body.dataset.ready === 'yes'")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        cut = browser.evaluate("""[...document.querySelectorAll('svg text')].filter((t) => {
          const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
          return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
        }).map((t) => t.textContent)""")
        assert cut == []
        assert browser.evaluate("Math.min(...[...document.querySelectorAll('svg text')]"
                                ".map((t) => t.getBoundingClientRect().height))") > 10
    browser.resize(1280, 1600)


def test_page_in_a_browser(trained, data, tmp_path, browser):
    """Loads without errors in light and dark; columns sort, the search filters, a legend hides its run."""
    out = tmp_path / "report.html"
    assert main(["report", trained.scl, "--oracle", trained.full, "--out", str(out)]) == 0
    assert "://" not in out.read_text().replace("http://www.w3.org/2000/svg", ""), "the page refers to nothing outside"
    colours = set()
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(out.as_uri(), "document.body.dataset.ready === 'yes'")
        assert browser.errors == []
        colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        browser.evaluate("document.getElementById('theme').click()")
        colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    cells = "[...document.querySelectorAll('#classes tbody tr:not(.hidden)')].map((r) => r.children[{}].textContent)"
    heads = browser.evaluate("[...document.querySelectorAll('#classes th')].map((h) => h.textContent)")
    column = heads.index("AP full")
    for falling in (True, False):
        browser.evaluate(f"document.querySelectorAll('#classes th')[{column}].click()")
        shown = [float(text) for text in browser.evaluate(cells.format(column))]
        assert shown == sorted(shown, reverse=falling)
        assert len(shown) == 10
    browser.evaluate("(() => { const f = document.querySelector('#classes input'); f.value = '7'; f.oninput(); })()")
    assert browser.evaluate(cells.format(0)) == ["7"]
    number = browser.evaluate("document.querySelector('#headline .number b').textContent")
    assert number == f"{data['headline']['score']:.1f}"
    assert browser.evaluate("document.querySelectorAll('#headline .finding').length") == 3
    notes = browser.evaluate("[...document.querySelectorAll('#headline .verdict')].map((e) => e.textContent.trim())")
    assert set(notes) <= {"✓ right", "✗ wrong"}
    hidden = "document.querySelectorAll('#curves svg g.hidden').length"
    browser.evaluate("document.querySelector('#curves .legend .entry').click()")
    assert browser.evaluate(hidden) == 1
    sections = browser.evaluate("[...document.querySelectorAll('section')].map((s) => s.id)")
    assert sections == ["headline", "runs", "gap", "curves", "classes", "beliefs", "heatmaps", "config", "plumbing",
                        "absent"]
    assert browser.evaluate("document.querySelectorAll('svg').length") >= 14
    browser.screenshot(tmp_path / "report.png")
    assert browser.errors == []


def test_names_cannot_become_markup(data, tmp_path, browser):
    evil = "</script><img id='evil' src=x onerror=\"document.body.dataset.evil='yes'\"><!--"
    changed = json.loads(json.dumps(data))
    changed["runs"][0]["name"] = changed["classes"]["rows"][0]["name"] = changed["absent"][0]["why"] = evil
    out = tmp_path / "evil.html"
    out.write_text(render(changed))
    browser.open(out.as_uri(), "document.body.dataset.ready === 'yes'")
    assert browser.evaluate("document.getElementById('evil')") is None
    assert browser.evaluate("document.body.dataset.evil") is None
    assert browser.evaluate("document.querySelector('#classes tbody td').textContent") == evil
    assert json.loads(embedded({"a": [float("nan"), "<"]})) == {"a": [None, "<"]}


def test_mistakes(trained, tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main(["report", trained.scl, "--samples", "0"]) == 2
    assert "--samples 0" in capsys.readouterr().err
