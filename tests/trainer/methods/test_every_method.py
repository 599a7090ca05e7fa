"""Every method trains on two ranks in one launch; what was left or killed inside an epoch resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from lacuna import state_store
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.trainer.methods import METHODS, example
from lacuna.trainer.methods.base import Method
from tests.helpers.launching import Launch, assert_equal_weights, last_checkpoint, losses, stored
from tests.helpers.neighborhoods import make_neighborhood

SAMPLES, STEPS = 48, 6  # two epochs of three steps
KILLED = "em_apl"
# Settings without which a method has nothing to do in so short a run.
SETTINGS: dict[str, dict] = {
    "epr": {"expected_positives": 2.2}, "role": {"expected_positives": 2.2, "lr": 0.03}, "ls": {"temperature": 3.0},
    "csl": {"budget": "batch", "top": 2}, "ll_r": {"delta_percent": 5.0}, "ll_ct": {"delta_percent": 5.0},
    "ll_cp": {"delta_percent": 5.0}, "em_apl": {"warmup_epochs": 1}, "mime": {"warmup_epochs": 1, "threshold": 0.3},
    "ignore": {"first_epoch": 1}, "lac": {"contrast_phase": 0, "contrast_threshold": 0.5, "queue": 32},
    "scpnet": {"base_threshold": 0.5}, "scob": {"expected_positives": 2.2, "lr": 0.03},
    "gpr": {"expected_positives": 2.2, "threshold": 0.1},
    "aevlp": {"expected_positives": 2.2, "threshold": 0.1}, "ccd": {"crops": True, "late_epoch": 1},
    **{f"{kind}{more}": {"expected_positives": 2.2} for kind in ("en", "ep", "epr") for more in ("", "_cl", "_scl")},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Shards with one positive and one negative a scene, score tables and neighbours of them."""
    folder = tmp_path_factory.mktemp("every")
    index = pack(digits.read(SAMPLES), str(folder / "train"), Layout(streams=1, rows_per_shard=8), workers=1)
    assert main(["annotate", index.url, "--scheme", "single_positive", "--name", "one_each", "--num-neg", "1"]) == 0
    rng = np.random.default_rng(0)
    keys = [key for shard in range(len(index.shards)) for key in ShardIndex.load(index.url).members(shard).keys]
    names = ("scores", "global", "crop_max", "crop_min")
    for name in names:
        np.savez(folder / f"{name}.npz", keys=np.array(keys), classes=np.array(index.classes),
                 scores=rng.dirichlet(np.full(10, 0.3), SAMPLES))
    assert main(["import-scores", *(f"{name}={folder / name}.npz" for name in names), "--shards", index.url,
                 "--out", str(folder / "tables")]) == 0
    near = np.stack([rng.permutation(np.delete(np.arange(SAMPLES), n))[:5] for n in range(SAMPLES)])
    make_neighborhood(str(folder / "near"), ShardSource.load(index.url, "one_each", None), near,
                      np.sort(rng.random((SAMPLES, 5)).astype(np.float32)), rng.random((10, 10)).astype(np.float32))
    return folder


def config(data: Path, name: str, suffix: str = "") -> dict:
    """Runs that are interrupted write a checkpoint after the fourth step too, inside the second epoch."""
    needs, settings = example(name).needs(), SETTINGS.get(name, {})
    if needs.scores:
        settings = {**settings, "scores": str(data / "tables")}
    if needs.neighbors:
        settings = {**settings, "neighbors": str(data / "near")}
    labels = "labels" if needs.full_labels else "one_each"
    strong = {"crop": "same", "color_jitter": [0.8, 0.8, 0.8, 0.2], "blur": 0.5} if needs.same_crop else {
        "randaugment": 2, "cutout": 0.5}
    return {
        "name": name + suffix, "method": {"name": name, **settings}, "model": {"backbone": "lacuna:tiny"},
        "data": {"train": {"url": str(data / "train"), "labels": labels}, "image_size": 32, "normalize": "centered",
                 "streams": 2, "open_shards": 2, "augment": {"crop": "random_resized"}, "strong_augment": strong},
        "phases": [{"name": "all", "epochs": 2, "batch": 16, "lr": 1e-3}],
        "train": {"log_every": 1, "checkpoint_every": "4st" if suffix else "1ep"},
    }


def remembers(kind: type[Method]) -> bool:
    """Whether a resume has more to bring back than the weights."""
    return (kind.fields is not Method.fields or kind.state is not Method.state or kind.module is not Method.module)


@pytest.fixture(scope="module")
def folder(data) -> Path:
    """Runs are left after the fifth step and go on from the fourth; the last is killed with the launch, and resumed by
    another launch."""
    jobs = []
    for name, kind in METHODS.items():
        jobs.append({"config": config(data, name)})
        if remembers(kind):
            jobs += [{"config": config(data, name, "-left"), "leave": 5}, {"config": config(data, name, "-left")}]
    killed = {"config": config(data, KILLED, "-killed")}
    assert Launch.many([*jobs, {**killed, "kill": 5}], "every", data, 2).wait(1800) != 0
    Launch.many([killed], "again", data, 2).ok()
    return data


@pytest.mark.parametrize("name", METHODS)
def test_trains_and_resumes(folder, name):
    found = losses(folder / name)
    assert len(found) == STEPS
    assert np.isfinite(found).all()
    if name == KILLED:
        assert_equal_runs(folder / name, folder / f"{name}-killed")
    if remembers(METHODS[name]):
        assert_equal_runs(folder / name, folder / f"{name}-left")


def assert_equal_runs(one: Path, two: Path) -> None:
    assert losses(one) == losses(two)
    assert_equal_weights(one, two)
    a, b = (load_file(last_checkpoint(run) / "method.safetensors") for run in (one, two))
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key].numpy(), b[key].numpy(), key)
    if (one / "state").exists():
        first, second = written(one), written(two)
        assert first.keys() == second.keys()
        for place in first:
            np.testing.assert_array_equal(first[place], second[place], str(place))


def written(run: Path) -> dict[tuple[str, int], np.ndarray]:
    """(field, shard) → stored rows; chunks that were never written have no rows of their own (tables, neighbours)."""
    store = state_store.open(str(run / "state"))
    reader = store.reader(last_checkpoint(run).name)
    return {(name, shard): reader.read_shard(name, shard) for name, shards in reader.refs.items() for shard in shards}


def test_methods_did_something(folder):
    """What passes, tables and queues are for has happened in these runs."""
    assert stored(folder / "ll_cp")["corrected"].any()
    assert stored(folder / "mime")["corrected"].any()
    assert (stored(folder / "em_apl")["score"] < 2**15 - 1024).any(), "no pseudo-negatives"
    assert stored(folder / "scpnet")["selected"].any()
    state = {name: load_file(last_checkpoint(folder / name) / "method.safetensors")
             for name in ("crisp", "lac", "ignore", "ccd", "scob")}
    assert (state["crisp"]["priors"] > 0).any()
    assert (state["lac"]["classes"] >= 0).any()
    assert state["ignore"]["gap"] > 0
    assert (state["ccd"]["bias"] != 1).any()
    assert state["scob"]["surest"].any()
    assert (state["scob"]["correlation"] > 0).all()
