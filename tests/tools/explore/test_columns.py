"""Proves that explore's indexes equal sorting everything, are built once, and stay on disk however many samples."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from lacuna import state_store
from lacuna.data_pipelines.index import Shard, ShardIndex, SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.state_store import Constant, Field
from lacuna.tools.cli import main
from lacuna.tools.explore import columns as column_files
from lacuna.tools.explore.columns import NOWHERE, build
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
