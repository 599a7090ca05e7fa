"""Proves that a pass gives the same bytes on 1 worker, 2 workers, 2 nodes and after a kill, and resumes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.pool import PoolSettings, open_pool
from lacuna.tools.passes.scoring import ScoreJob, ShardModel, bad_of, shard_rows
from lacuna.tools.passes.trained import check_classes, load_model, open_trained
from tests.helpers.pass_jobs import KilledOnce, Squares


@pytest.fixture(scope="module")
def pool():
    with open_pool(PoolSettings(workers=2)) as pool:
        assert pool.room.workers == 2  # Ray runs from here on
        yield pool


def alone(*what):
    """A pass with one worker of the Ray that runs."""
    with open_pool(PoolSettings(workers=1)) as one:
        return one.run(*what)


@pytest.fixture(scope="module")
def job(trained) -> ScoreJob:
    return ScoreJob(open_trained(trained.full), ShardSource.load(str(trained.data / "val"), "labels", None))


@pytest.fixture(scope="module")
def expected(job, tmp_path_factory) -> Path:
    """The parts as made without Ray."""
    folder = tmp_path_factory.mktemp("expected")
    work, parts = job.build(), Parts(str(folder), job.fingerprint)
    for shard in shard_rows(job.source):
        parts.write(shard, work(shard))
    return folder


def same_files(a: Path, b: Path) -> bool:
    names = sorted(p.name for p in a.iterdir())
    return names == sorted(p.name for p in b.iterdir()) and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_scores_do_not_depend_on_workers_or_kills(pool, job, expected, tmp_path):
    rows = shard_rows(job.source)
    alone(job, rows, str(tmp_path / "one"), "scoring")
    assert same_files(expected, tmp_path / "one")
    killed = KilledOnce(job, shard=1, flag=str(tmp_path / "killed"))
    pool.run(killed, rows, str(tmp_path / "two"), "scoring")
    assert (tmp_path / "killed").exists()
    assert same_files(expected, tmp_path / "two")


def test_rerun_skips_finished_shards(pool, tmp_path):
    rows = dict.fromkeys(range(5), 1)
    with pytest.raises(UserError, match=r"^shard 3: truncated\.$"):
        alone(Squares(str(tmp_path / "log"), refuses=3), rows, str(tmp_path / "parts"), "x")
    parts = pool.run(Squares(str(tmp_path / "log")), rows, str(tmp_path / "parts"), "x")
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "1", "2", "3", "4"]  # each once over both runs
    assert [int(part["square"]) for _, part in parts.read_all(list(rows))] == [0, 1, 4, 9, 16]
    with open_pool(PoolSettings(address="127.0.0.1:1")) as unneeded:  # where there is no work, Ray is not asked
        unneeded.run(Squares(str(tmp_path / "log")), rows, str(tmp_path / "parts"), "x")
        assert unneeded._room is None
    # Another fingerprint is another pass: nothing of the first is reused.
    pool.run(Squares(str(tmp_path / "log"), fingerprint="other"), {2: 1}, str(tmp_path / "parts"), "x")
    assert (tmp_path / "log").read_text().split().count("2") == 2


def test_errors_name_their_cause(pool, tmp_path):
    with pytest.raises(UserError, match=r"^model.backbone = 'x': no such backbone\.$"):
        alone(Squares(builds=False), {0: 1}, str(tmp_path), "x")
    with pytest.raises(UserError, match="3 workers died over shard 0"):
        alone(Squares(dies=0), {0: 1}, str(tmp_path), "x")
    with pytest.raises(UserError, match=r"part-000007\.squares\.npz.*--parts"):
        Parts(str(tmp_path), "squares").read(7)
    Path(Parts(str(tmp_path), "squares").url(7)).write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(UserError, match="damaged"):
        Parts(str(tmp_path), "squares").read(7)


@pytest.mark.long
def test_two_nodes(job, expected, tmp_path, pool):
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()  # the module's pool: this is its last test
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        with open_pool(PoolSettings(address=cluster.address)) as two:
            assert two.room.workers == 2
            assert [node["Resources"]["CPU"] for node in ray.nodes()] == [1, 1]  # so there is one on each
            two.run(job, shard_rows(job.source), str(tmp_path / "nodes"), "scoring")
    finally:
        cluster.shutdown()
    assert same_files(expected, tmp_path / "nodes")


def test_trained_model_is_the_best_checkpoint(trained, job, expected):
    folder, trained = Path(trained.full), job.trained
    results = json.loads((folder / "results.json").read_text())
    assert trained.checkpoint.endswith(f"step-{results['best_step']:08d}")
    assert open_trained(trained.checkpoint) == trained
    assert trained.classes == job.source.index.classes
    worker = ShardModel(load_model(trained, job.source, torch.device("cpu")), job.source, trained.config)
    scores, facts = worker.scores(0)
    part = Parts(str(expected), job.fingerprint).read(0)
    assert np.array_equal(scores, part["scores"])
    assert bad_of(part) == []
    assert np.array_equal(facts["rows"], np.arange(job.source.index.shards[0].count))


def test_bad_checkpoints(job, tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        open_trained(str(tmp_path / "nowhere"))
    (tmp_path / "young").mkdir()
    shutil.copy(Path(job.trained.run, "config.yaml"), tmp_path / "young")
    with pytest.raises(UserError, match="no finished checkpoint"):
        open_trained(str(tmp_path / "young"))
    with pytest.raises(UserError, match="never finished"):
        open_trained(str(tmp_path / "checkpoints" / "step-00000001"))
    copy = tmp_path / "run"
    shutil.copytree(job.trained.run, copy)
    trained = open_trained(str(copy))
    Path(trained.checkpoint, trained.weights).write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="damaged"):
        load_model(trained, job.source, torch.device("cpu"))
    index = job.source.index
    swapped = dataclasses.replace(index, classes=[index.classes[1], index.classes[0], *index.classes[2:]], class_ids=[])
    with pytest.raises(UserError, match=f"class 0 is {index.classes[1]!r}, the model's is {index.classes[0]!r}"):
        check_classes(trained, swapped)
    check_classes(trained, index)


def test_sets_of_equal_sizes_are_different_passes(trained, job):
    """val and test of these scenes agree in names, rows and bytes of every shard: their index has one fingerprint."""
    test = ShardSource.load(str(trained.data / "test"), "labels", None)
    assert ScoreJob(job.trained, test).fingerprint != job.fingerprint


def test_parts_on_object_storage():
    parts = Parts("memory://passes/parts", "squares")
    assert parts.finished([0, 1]) == set()
    parts.write(1, {"square": np.array(1)})
    assert parts.finished([0, 1]) == {1}
    assert int(parts.read(1)["square"]) == 1
    parts.remove([0, 1])
    assert parts.finished([0, 1]) == set()
