"""`lacuna neighbors` with a trained backbone, with faiss, and after kills: the same neighbours as by definition."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import NearestNeighbors

from lacuna import state_store
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import features
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.neighbors.approximate import build_index
from lacuna.tools.neighbors.featuring import FeatureJob
from lacuna.tools.neighbors.searching import SearchJob
from lacuna.tools.neighbors.vectors import VectorReader
from lacuna.tools.passes.pool import PoolSettings, open_pool
from lacuna.tools.passes.scoring import shard_rows
from lacuna.tools.passes.trained import load_model, open_trained
from lacuna.trainer.neighbors import DISTANCES_NAME, FACTS_NAME, MEDIANS_NAME, Neighborhood, stored_fields
from tests.helpers.pass_jobs import KilledOnce
from tests.helpers.processes import descendants, lives

MEMORY = 1 << 24


@pytest.fixture(scope="module")
def images(trained) -> str:
    """The validation scenes, half of their labels unknown."""
    url = str(trained.data / "val")
    index = ShardIndex.load(url)
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "half", "rpa", SCHEMES["rpa"](seed=3))
    return url


@pytest.fixture(scope="module")
def pool():
    with open_pool(PoolSettings(workers=1)) as pool:
        yield pool


def looked_at(checkpoint: str, url: str) -> np.ndarray:
    """Unit vectors [N, D] of a model's pooled features, image by image: tar member → pixels → backbone → mean."""
    trained, index = open_trained(checkpoint), ShardIndex.load(url)
    model = load_model(trained, ShardSource.load(url, "labels", None), torch.device("cpu"))
    rows = []
    for shard in index.shards:
        with tarfile.open(os.path.join(url, shard.name)) as tar, torch.no_grad():
            for member in tar:
                pixels = np.asarray(Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB"), np.float32)
                image = torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)[None]
                rows.append(model.features(image).mean((2, 3))[0].double().numpy())
    vectors = np.array(rows)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def stored(out: str) -> dict[str, np.ndarray]:
    """All samples' fields in order."""
    made = Neighborhood.open(out)
    reader = state_store.open(os.path.join(out, "state")).reader("neighbors")
    shards = range(len(ShardIndex.load(os.path.join(out, "features")).shards))
    return {field.name: np.concatenate([reader.read_shard(field.name, shard) for shard in shards])
            for field in stored_fields(made.k, made.slots)}


@pytest.mark.parametrize("given", ["checkpoint", pytest.param("run", marks=pytest.mark.long)])
def test_neighbors_by_a_trained_backbone(trained, images, pool, tmp_path, capsys, given):
    """A checkpoint that is not the best one has features of its own; a run stands for its best one."""
    best = open_trained(trained.full).checkpoint
    folder = Path(trained.full) / "checkpoints"
    worse = min(str(path) for path in folder.iterdir() if path.name.startswith("step-") and str(path) != best)
    asked, checkpoint, other = (worse, worse, best) if given == "checkpoint" else (trained.full, best, worse)
    out = str(tmp_path / "near")
    assert main(["neighbors", asked, "--shards", images, "--labels", "half", "--out", out, "-k", "5", "--workers", "1",
                 "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["samples"], facts["unreadable"]) == (60, 0)
    vectors, fields = looked_at(checkpoint, images), stored(out)
    nearest = [NearestNeighbors(n_neighbors=5, algorithm="brute").fit(v).kneighbors()[0]
               for v in (vectors, looked_at(other, images))]
    np.testing.assert_allclose(fields["neighbor_distances"], nearest[0], atol=2e-3)  # features are kept as float16
    assert np.abs(fields["neighbor_distances"] - nearest[1]).max() > 0.01
    apart = np.linalg.norm(vectors[fields["neighbor_ids"]] - vectors[:, None], axis=2)
    np.testing.assert_allclose(apart, nearest[0], atol=4e-3)  # ids belong to the distances
    source = ShardSource.load(images, "half", None)
    labels = np.concatenate([source.sidecar.labels(s).dense(source.classes) for s in shard_rows(source)])
    medians = [np.median(vectors[labels[:, c] == POSITIVE], axis=0) for c in range(source.classes)]
    np.testing.assert_allclose(np.load(os.path.join(out, MEDIANS_NAME)), medians, atol=2e-3)
    assert os.path.basename(checkpoint) in ShardIndex.load(os.path.join(out, "features")).source["model"]
    assert not os.path.exists(os.path.join(out, "parts"))


def run_with_a_kill(pool, job, shard: int, tmp_path) -> list[tuple[int, dict]]:
    flag = tmp_path / "killed"
    kept = pool.run(KilledOnce(job, shard, str(flag)), shard_rows(job.source), str(tmp_path / "parts"), "test")
    assert flag.exists()
    return list(kept.read_all(list(shard_rows(job.source))))


def test_a_worker_killed_in_the_search_changes_nothing(clustered, pool, tmp_path):
    job = SearchJob(ShardSource.load(clustered, "half", None), 4, "euclidean", MEMORY)
    work = job.build()
    for shard, part in run_with_a_kill(pool, job, 2, tmp_path):
        for name, expected in work(shard).items():
            np.testing.assert_array_equal(part[name], expected)


@pytest.mark.long
def test_a_worker_killed_after_it_wrote_features_changes_nothing(trained, images, pool, tmp_path):
    """It dies between the shard's tar and its part, so the shard is written twice, with the same bytes."""
    job = FeatureJob(open_trained(trained.full), ShardSource.load(images, "half", None), str(tmp_path / "features"))
    parts = run_with_a_kill(pool, job, 1, tmp_path)
    work = job.build()
    for shard, part in parts:
        tar = Path(job.out) / f"{job.source.index.shards[shard].stem}.tar"
        by_pool = tar.read_bytes()
        assert {name: int(v) for name, v in work(shard).items()} == {name: int(v) for name, v in part.items()}
        assert tar.read_bytes() == by_pool


@pytest.mark.long
def test_a_killed_command_goes_on_where_it_was(trained, pool, tmp_path, capsys):
    """SIGKILL of the whole command after its first part; the same command then does the rest, and only the rest."""
    url = str(trained.data / "train")
    flags = ["neighbors", trained.full, "--shards", url, "--labels", "single", "-k", "3", "--workers", "1"]
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    assert main([*flags, "--out", whole, "--json"]) == 0
    parts = tmp_path / "parts"
    again = [*flags, "--out", broken, "--parts", str(parts), "--json"]
    command = subprocess.Popen([sys.executable, "-m", "lacuna.tools.cli", *again], start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (parts.is_dir() and any(path.suffix == ".npz" for path in parts.iterdir())):
        assert command.poll() is None
        time.sleep(0.005)
    its = descendants(command.pid)
    os.killpg(command.pid, signal.SIGKILL)  # its Ray workers, too, as far as they are in its session
    command.wait()
    assert not os.path.exists(os.path.join(broken, FACTS_NAME))
    end = time.monotonic() + 300
    while any(map(lives, its)):  # workers that outlive it finish their shard
        assert time.monotonic() < end, "Ray's processes outlive their driver"
        time.sleep(0.1)
    done = {path.name: path.stat().st_mtime_ns for path in parts.iterdir() if path.suffix == ".npz"}
    assert main(again) == 0
    after = {path.name: path.stat().st_mtime_ns for path in parts.iterdir() if path.suffix == ".npz"}
    assert len(done) < len(after)
    assert {name: after[name] for name in done} == done
    for name in (DISTANCES_NAME, MEDIANS_NAME):
        assert Path(broken, name).read_bytes() == Path(whole, name).read_bytes()
    expected, found = stored(whole), stored(broken)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory) -> str:
    """4,000 vectors in 200 overlapping clumps, as features of images are."""
    folder = tmp_path_factory.mktemp("clumps")
    rng = np.random.default_rng(0)
    clump = rng.integers(0, 200, 4000)
    np.save(folder / "x.npy", (rng.normal(0, 1, (200, 48))[clump] + rng.normal(0, 0.6, (4000, 48))).astype(np.float32))
    np.save(folder / "y.npy", (clump[:, None] % 5 == np.arange(5)).astype(np.int8))
    url = str(folder / "shards")
    index = pack(features.read(str(folder / "x.npy"), str(folder / "y.npy"), None), url,
                 Layout(streams=1, rows_per_shard=700))
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "half", "rpa", SCHEMES["rpa"](seed=3))
    return url


def searched(source: ShardSource, k: int, ivf: str | None) -> tuple[np.ndarray, np.ndarray]:
    work = SearchJob(source, k, "euclidean", MEMORY, ivf).build()
    parts = [work(shard) for shard in range(len(source.index.shards))]
    return np.concatenate([p["ids"] for p in parts]), np.concatenate([p["distances"] for p in parts])


def test_ivf_finds_nearly_all_neighbors(clustered, tmp_path):
    pytest.importorskip("faiss")
    source = ShardSource.load(clustered, "half", None)
    build_index(source, str(tmp_path / "vectors.faiss"), MEMORY)
    exact, distances = searched(source, 10, None)
    ids, approximate = searched(source, 10, str(tmp_path / "vectors.faiss"))
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.tolist(), ids.tolist(), strict=True)])
    assert recall > 0.95, recall
    assert (ids != np.arange(4000)[:, None]).all()  # never itself
    assert all(len(set(row)) == 10 for row in ids.tolist())
    assert (approximate >= distances - 1e-3).all()  # none can be nearer than the exact ones
    reader = VectorReader(source, MEMORY)
    vectors = np.concatenate([reader.shard(shard).matrix for shard in range(len(source.index.shards))])
    apart = np.linalg.norm(vectors[ids] - vectors[:, None], axis=2)
    np.testing.assert_allclose(approximate, apart, atol=1e-3)


@pytest.mark.long
def test_ivf_by_the_command(clustered, pool, tmp_path, capsys):
    pytest.importorskip("faiss")
    found = {}
    for search in ("exact", "ivf"):
        out = str(tmp_path / search)
        assert main(["neighbors", "--shards", clustered, "--labels", "half", "--out", out, "-k", "4", "--json",
                     "--search", search, "--workers", "1"]) == 0
        capsys.readouterr()
        reader = state_store.open(os.path.join(out, "state")).reader("neighbors")
        found[search] = np.concatenate([reader.read_shard("neighbor_ids", shard) for shard in range(6)])
        assert json.loads(Path(out, FACTS_NAME).read_text())["search"] == search
        assert not os.path.exists(os.path.join(out, "vectors.faiss"))
    assert (found["exact"] == found["ivf"]).mean() > 0.95
