"""Proves that `lacuna explore` indexes, shows and records what is there: columns, server, decisions and page."""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Shard, ShardIndex, Sidecar, SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.state_store import Constant, Field
from lacuna.tools.cli import main
from lacuna.tools.explore import columns as column_files
from lacuna.tools.explore import open_desk
from lacuna.tools.explore.columns import NOWHERE, build
from lacuna.tools.explore.server import make_server
from lacuna.tools.report.beliefs import state_view

L = 7


def labelled(folder, rows: list[int], subset: bool, seed: int = 0) -> tuple[ShardSource, list[np.ndarray]]:
    """An index without tars, random ternary labels, and beliefs with ties."""
    rng = np.random.default_rng(seed)
    index = ShardIndex(str(folder), [f"c{i}" for i in range(L)], [Shard(f"s{i}.tar", n, 0) for i, n in enumerate(rows)])
    index.save()
    writer = SidecarWriter(index, "labels", UNKNOWN, {})
    beliefs = []
    for shard, n in enumerate(rows):
        dense = rng.choice(np.array([POSITIVE, NEGATIVE, UNKNOWN], np.int8), (n, L), p=[0.2, 0.1, 0.7])
        writer.write(shard, SparseLabels.from_dense(dense))
        beliefs.append(rng.random((n, L)).round(2).astype(np.float32))
    masks = [rng.random(n) < 0.6 for n in rows]
    chosen = Subset.from_masks(index, "some", masks, {}) if subset else None
    return ShardSource(index, writer.close(), chosen), beliefs


@pytest.mark.parametrize("subset", [False, True])
def test_columns_equal_sorting_everything(tmp_path, monkeypatch, subset):
    monkeypatch.setattr(column_files, "_PER_CLASS", 12)
    source, beliefs = labelled(tmp_path, [30, 0, 17, 25], subset)
    used = [column_files.used_rows(source, s) for s in range(4)]
    made = build(str(tmp_path / "columns"), source, lambda s: (beliefs[s][used[s]], used[s]), {"origin": "test"})
    everything = [(s, int(r), source.sidecar.labels(s).dense(L)[r], beliefs[s][r]) for s in range(4) for r in used[s]]
    for cls in range(L):
        # A stable sort of rows in order: ties come as they are met.
        missing = sorted((e for e in everything if e[2][cls] == UNKNOWN and e[3][cls] > 0), key=lambda e: -e[3][cls])
        total, items = made.list("missing", cls, 0, 100)
        assert [(i["shard"], i["row"]) for i in items] == [(e[0], e[1]) for e in missing[:12]]
        assert total == min(12, len(missing))
        wrong = sorted((abs((e[2][cls] == POSITIVE) - e[3][cls]), e[0], e[1]) for e in everything
                       if e[2][cls] != UNKNOWN)[::-1][:12]
        np.testing.assert_allclose([i["score"] for i in made.list("disagree", cls, 0, 100)[1]], [w[0] for w in wrong],
                                   atol=1e-6)
        positive = [(e[0], e[1]) for e in everything if e[2][cls] == POSITIVE]
        total, items = made.list("annotated", cls, 3, 5)
        assert total == len(positive)
        assert [(i["shard"], i["row"]) for i in items] == positive[3:8]
    total, items = made.list("missing", None, 5, 40)
    scores = [i["score"] for i in items]
    flat = np.sort(made.places["missing"]["score"][made.places["missing"]["shard"] != NOWHERE])[::-1]
    np.testing.assert_array_equal(scores, flat[5:45].astype(float))


def desk_of(run: str):
    return open_desk(run, None, argparse.Namespace(workers=1, address=None, parts=None))


@pytest.fixture
def served(trained):
    """(desk, port) of a running server over the EN+SCL run."""
    desk = desk_of(trained.scl)
    with make_server(desk, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield desk, server.server_port
        server.shutdown()
        thread.join()
    Path(desk.decisions.path).unlink(missing_ok=True)


def ask(port: int, path: str, body: dict | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST" if body is not None else "GET", path, json.dumps(body) if body is not None else None,
                       headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_answers(served, trained):
    desk, port = served
    code, body = ask(port, "/api/list?view=missing&class=3&count=4")
    items = json.loads(body)["items"]
    assert (code, len(items)) == (200, 4)
    store = state_store.open(trained.scl + "/state")
    scores = store.reader(store.snapshots()[-1].name).read_shard("score", items[0]["shard"])
    assert items[0]["score"] == pytest.approx(scores[items[0]["row"], 3] / 255)
    sample = json.loads(ask(port, f"/api/sample?shard={items[0]['shard']}&row={items[0]['row']}")[1])
    assert sample["key"] == desk.source.index.members(items[0]["shard"]).keys[items[0]["row"]]
    assert len(sample["positives"]) == 1
    assert sample["maps"] == list(range(10))
    place = f"shard={items[0]['shard']}&row={items[0]['row']}"
    plain, heat = ask(port, f"/picture?{place}"), ask(port, f"/picture?{place}&class=3")
    assert plain[0] == heat[0] == 200
    assert plain[1][:2] == heat[1][:2] == b"\xff\xd8"
    assert plain[1] != heat[1]
    for path, code in (("/api/list?view=class", 400), ("/api/list?class=99", 400), ("/picture?shard=0&row=9999", 400),
                       ("/api/sample?shard=x&row=0", 400), ("/../etc/passwd", 404)):
        assert ask(port, path)[0] == code, path


def test_mistakes(trained, served, capsys):
    assert main(["explore", str(trained.data)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main(["explore", trained.scl, "--port", str(served[1])]) == 2
    assert "Choose another" in capsys.readouterr().err


def test_other_sites_are_refused(served):
    desk, port = served
    entry = {"shard": 0, "row": 0, "class": 0, "decision": "accept"}
    assert ask(port, "/api/overview", None, Host="evil.example")[0] == 403
    assert ask(port, "/api/decide", entry)[0] == 403, "a page of another site cannot send our header"
    assert ask(port, "/api/decide", {**entry, "decision": "maybe"}, **{"X-Lacuna": "1"})[0] == 400
    assert ask(port, "/api/decide", {**entry, "row": 10**6}, **{"X-Lacuna": "1"})[0] == 400
    assert desk.decisions.made == {}


def test_decisions_survive_and_train(served, trained, tmp_path):
    """Decided, killed in the middle of a line, opened again, exported: a table and a sidecar with exactly that."""
    desk, port = served
    for entry, word in (((0, 1, 4), "accept"), ((2, 0, 5), "reject"), ((3, 3, 3), "accept"), ((3, 3, 3), "undo")):
        body = dict(zip(("shard", "row", "class"), entry, strict=True)) | {"decision": word}
        assert ask(port, "/api/decide", body, **{"X-Lacuna": "1"})[0] == 200
    with open(desk.decisions.path, "a") as f:
        f.write('{"shard": 1, "ro')
    again = desk_of(trained.scl)
    assert again.decisions.made == {(0, 1, 4): "accept", (2, 0, 5): "reject"}
    for kind in ("csv", "parquet"):
        written = again.export(kind, "")["written"]
        rows = list(csv.DictReader(open(written))) if kind == "csv" else pq.read_table(written).to_pylist()  # noqa: SIM115
        assert [(r["key"], r["name"], r["decision"]) for r in rows] == [
            (desk.source.index.members(0).keys[1], "4", "accept"),
            (desk.source.index.members(2).keys[0], "5", "reject")]
    again.export("sidecar", "reviewed")
    reviewed, base = (Sidecar.load(desk.source.index, name) for name in ("reviewed", "single"))
    for shard in range(len(desk.source.index.shards)):
        expected = base.labels(shard).dense(10)
        if shard == 0:
            expected[1, 4] = POSITIVE
        if shard == 2:
            expected[0, 5] = NEGATIVE
        np.testing.assert_array_equal(reviewed.labels(shard).dense(10), expected)
    with pytest.raises(UserError, match="one already"):
        again.export("sidecar", "reviewed")


def test_page_in_a_browser(served, browser, tmp_path):
    """Browse by class and view, decide with the keyboard, overlay a heatmap, export; no errors on the way."""
    desk, port = served
    browser.open(f"http://127.0.0.1:{port}/", "document.body.dataset.ready === 'yes'")
    text = "document.getElementById('{}').textContent"
    browser.wait_for("document.getElementById('picture').naturalWidth > 0")
    first = desk.page("missing", None, 0, 2)["items"]
    assert browser.evaluate(text.format("question")) == f"Is this {first[0]['name']}? {first[0]['score']:.3f}"
    idle = "document.body.dataset.busy === 'no'"
    browser.wait_for(idle)
    browser.evaluate("for (const key of 'ar') document.onkeydown({ key, target: document.body, preventDefault() {} })")
    browser.wait_for(idle)
    entries = [(i["shard"], i["row"], i["class"]) for i in first]
    assert desk.decisions.made == {entries[0]: "accept"}, "the second key came before the next sample was shown"
    assert browser.evaluate(text.format("count")).startswith("2 of")
    for key, said, decisions in (("r", "", {entries[0]: "accept", entries[1]: "reject"}),
                                 ("k", "rejected", {entries[0]: "accept", entries[1]: "reject"}),
                                 ("u", "", {entries[0]: "accept"})):
        browser.press(key)
        browser.wait_for(idle)
        assert browser.evaluate(text.format("decision")) == said
        assert desk.decisions.made == decisions
    assert browser.evaluate(text.format("decided")) == "1 accepted, 0 rejected"
    browser.press("h")
    browser.wait_for("document.getElementById('picture').src.includes('class=')")
    browser.wait_for("document.getElementById('picture').naturalWidth >= 256")
    browser.evaluate("(() => { const s = document.getElementById('search'); s.value = '7'; s.oninput(); })()")
    assert browser.evaluate("[...document.querySelectorAll('.class:not(.hidden) span:first-child')]"
                            ".map((e) => e.textContent)").count("7") == 1
    browser.wait_for(idle)
    browser.evaluate("document.querySelector('.class[data-id=\"7\"]').click()")
    browser.wait_for(text.format("title") + " === '7'")
    browser.wait_for(idle)
    browser.evaluate("document.querySelector('[data-view=annotated]').click()")
    total = int(desk.columns.starts[8] - desk.columns.starts[7])
    browser.wait_for(text.format("count") + f" === '1 of {total}'")
    browser.wait_for(idle)
    browser.evaluate("document.querySelector('[data-export=csv]').click()")
    browser.wait_for(text.format("message") + ".includes('1 decisions written')")
    browser.screenshot(tmp_path / "explore.png")
    assert browser.errors == []


@pytest.mark.long
def test_a_run_without_state_is_scored_once(trained, capsys):
    """BCE remembers nothing: its best checkpoint is run over the training set, and what it said is kept."""
    command = ["explore", trained.full, "--index-only", "--labels", "single", "--workers", "1", "--json"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "scores of step-" in json.loads(first.out)["origin"]
    assert "scoring: 410 of 410" in first.err
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "scoring" not in again.err


@pytest.mark.long
def test_a_million_samples_stay_on_disk(tmp_path):
    """1,000 shards of 1,000 rows: memory is a few shards and the index's places, a page comes from the files."""
    rows = [1000] * 1000
    index = ShardIndex(str(tmp_path / "data"), [f"c{i}" for i in range(L)],
                       [Shard(f"s{i:04d}.tar", n, 0) for i, n in enumerate(rows)])
    index.save()
    writer = SidecarWriter(index, "labels", UNKNOWN, {})
    fields = [Field("score", (L,), "uint8", Constant(0.0), range=(0, 1))]
    store = state_store.create(str(tmp_path / "state"), rows, index.fingerprint, fields)
    with store.session(store.begin_launch(), budget=10**7) as session:
        for shard in range(len(rows)):
            rng = np.random.default_rng(shard)
            writer.write(shard, SparseLabels.from_lists(rng.integers(0, L, (1000, 1)).tolist(), [[]] * 1000))
            session.lease(shard)
            session.scatter("score", np.full(1000, shard), np.arange(1000), rng.integers(0, 256, (1000, L), np.uint8))
            session.release(shard)
        session.finish()
        session.snapshot("end")
    source = ShardSource(index, writer.close())
    tracemalloc.start()
    made = build(str(tmp_path / "columns"), source, state_view(store, "end", "score", source).shard, {"origin": "x"})
    assert sum(made.list("annotated", cls, 0, 1)[0] for cls in range(L)) == 1_000_000
    assert made.list("missing", None, 0, 50)[1][0]["score"] == 1.0
    assert made.list("annotated", 3, 100_000, 50)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All beliefs are 28 MB, all dense labels 7 MB, their intermediate results a multiple.
    assert peak < 20e6, f"{peak / 1e6:.0f} MB"
