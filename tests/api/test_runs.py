"""Proves that open_run and open_state show what a real run's files hold, on a disk and on other storage."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import fsspec
import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file

import lacuna
from lacuna import state_store
from lacuna.data_pipelines.index import ShardIndex, Sidecar


def test_metrics_results_and_classes_are_those_of_the_folder(finished):
    run, folder = lacuna.open_run(finished.folder), Path(finished.folder)
    assert run.results == finished
    assert run.name == "scl"
    assert run.config == lacuna.load_config(str(folder / "config.yaml"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics == lines
    table = run.metrics.frame()
    assert isinstance(table, pandas.DataFrame)
    assert table["step"].tolist() == [line["step"] for line in lines]
    assert table.loc[table["kind"] == "train", "loss"].tolist() == [x["loss"] for x in lines if x["kind"] == "train"]
    assert run.classes == ShardIndex.load(run.config.data.train.url).classes
    with (folder / "test_classes.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [row["ap"] for row in run.class_results()] == [float(row["ap"]) if row["ap"] else None for row in rows]
    assert finished.test["map"] == pytest.approx(100 * np.mean([float(row["ap"] or 0) for row in rows]))


def test_weights_are_the_best_epochs_or_those_of_a_name(finished):
    run, folder = finished.run, Path(finished.folder) / "checkpoints"
    assert run.checkpoints == sorted(path.parent.name for path in folder.glob("*/COMMIT.json"))
    assert len(run.checkpoints) > 2
    for name, weights in ((f"step-{finished.best_step:08d}", run.checkpoint()),
                          (run.checkpoints[0], run.checkpoint(run.checkpoints[0]))):
        expected = load_file(folder / name / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in weights)
    with pytest.raises(lacuna.UserError, match=r"no finished checkpoint 'step-7'; there are \['step-"):
        run.checkpoint("step-7")


def test_predictions_reach_the_score_that_the_run_wrote_down(finished, single_shards):
    scores = finished.run.predict(str(single_shards / "test"))
    assert scores.scores.shape == scores.labels.shape == (60, 10)
    summary = lacuna.average_precision(scores.scores, scores.labels).summary()
    assert summary["map"] == pytest.approx(finished.test["map"], abs=1e-3)
    table = scores.frame()
    assert table.columns.tolist() == ["shard", "row", *finished.run.classes]
    index = ShardIndex.load(str(single_shards / "test"))
    names = [key for shard in range(len(index.shards)) for key in index.members(shard).keys]
    assert table.index.tolist() == scores.keys == names
    part = finished.run.predict(str(single_shards / "test"), shards=[2])
    np.testing.assert_array_equal(part.scores, scores.scores[scores.shards == 2])
    with pytest.raises(lacuna.UserError, match=r"has shards 0\.\.3"):
        finished.run.predict(str(single_shards / "test"), shards=[9])


def test_predicting_the_training_set_uses_the_labels_it_was_trained_with(finished, single_shards):
    index = ShardIndex.load(str(single_shards / "train"))
    own = finished.run.predict(shards=[1])
    np.testing.assert_array_equal(own.labels, Sidecar.load(index, "single").labels(1).dense(10))
    full = finished.run.predict(labels="labels", shards=[1])
    np.testing.assert_array_equal(full.labels, Sidecar.load(index, "labels").labels(1).dense(10))


def test_beliefs_are_the_scores_that_the_state_remembers(finished, single_shards):
    run = finished.run
    store = state_store.open(str(Path(finished.folder) / "state"))
    index = ShardIndex.load(str(single_shards / "train"))
    for snapshot in (None, run.state().snapshots[0]):
        beliefs = run.beliefs(snapshot)
        name = snapshot or store.snapshots()[-1].name
        refs = store.manifest(name).refs["score"]
        assert sorted(set(beliefs.shards.tolist())) == sorted(refs)  # shards that were visited
        reader, field = store.reader(name), store.schema.fields["score"]
        expected = np.concatenate([field.decode(reader.read_shard("score", shard)) for shard in sorted(refs)])
        np.testing.assert_array_equal(beliefs.scores, expected)
        assert beliefs.keys == [key for shard in sorted(refs) for key in index.members(shard).keys]
        assert (beliefs.labels == 1).sum(axis=1).tolist() == [1] * len(beliefs)


def test_the_state_has_every_row_also_where_it_was_never_written(finished, single_shards):
    """Inside the first epoch some shards are still at their start: EN's scores are 1 where a positive is known."""
    run = finished.run
    state = run.state(run.state().snapshots[0])
    refs = state_store.open(state.url).manifest(state.snapshot).refs["score"]
    unseen = [shard for shard in range(len(state.counts)) if shard not in refs]
    assert unseen
    assert refs
    known = Sidecar.load(ShardIndex.load(str(single_shards / "train")), "single")
    for shard in unseen:
        np.testing.assert_array_equal(state.read("score", shard), known.labels(shard).dense(10) == 1)
    table = state.frame("score")
    assert len(table) == state.counts.sum()
    assert table.columns.tolist() == run.classes
    np.testing.assert_array_equal(table.loc[unseen[0]].to_numpy(), state.read("score", unseen[0]))
    group = pickle.loads(pickle.dumps(state.zarr()))  # dask sends it to other processes
    for shard, rows in enumerate(state.counts):
        np.testing.assert_array_equal(group["score"][shard, :rows], state.read("score", shard, stored=True))
    with pytest.raises(lacuna.UserError, match=r"never written.*open_run\(run\).state\(\)"):
        lacuna.open_state(state.url, state.snapshot).read("score", unseen[0])


def test_a_state_url_opens_alone(finished):
    state = lacuna.open_state(str(Path(finished.folder) / "state"))
    assert state.snapshot == state.snapshots[-1]
    assert {"score", "heat"} <= set(state.fields)
    assert state.read("heat", 0).shape == (state.counts[0], *state.fields["heat"].shape)
    with pytest.raises(lacuna.UserError, match="a table has two dimensions"):
        state.frame("heat")
    with pytest.raises(lacuna.UserError, match="no field 'scores'; it has score"):
        state.read("scores", 0)
    with pytest.raises(lacuna.UserError, match=r"the store has shards 0\.\.12"):
        state.read("score", 13)
    with pytest.raises(lacuna.UserError, match="no snapshot 'x'; there are"):
        lacuna.open_state(state.url, "x")


def test_a_run_on_other_storage_reads_the_same(finished):
    memory = fsspec.filesystem("memory")
    memory.put(finished.folder, "/lacuna-runs/scl", recursive=True)
    try:
        here, there = finished.run, lacuna.open_run("memory://lacuna-runs/scl")
        assert there.metrics == here.metrics
        assert there.classes == here.classes
        assert there.results is not None
        assert there.results.test == finished.test
        mine, theirs = here.checkpoint(), there.checkpoint()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        np.testing.assert_array_equal(there.beliefs().scores, here.beliefs().scores)
        np.testing.assert_array_equal(there.state().zarr()["score"][:], here.state().zarr()["score"][:])
    finally:
        memory.rm("/lacuna-runs", recursive=True)


def test_what_is_not_a_run_is_named(tmp_path):
    with pytest.raises(lacuna.UserError, match="is not a run folder"):
        lacuna.open_run(str(tmp_path))


def test_methods_are_described_as_the_command_does(capsys):
    from lacuna.tools import cli

    cli.main(["methods", "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(list(lacuna.methods().values())))
    assert {"role", "en_scl", "an"} <= set(lacuna.methods())
