"""Whole runs: estimators, ZeRO, bf16, accumulation, EN's masks, and ImageNet to EN+SCL with a kill in between.

Three launches for all of them: 2 ranks from the start (the last run is killed), 2 ranks that resume, and 1 rank.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import imagenet
from lacuna.state_store.topk import UNTRACKED
from lacuna.tools.launches import timeless
from tests.helpers.launching import (
    Launch,
    assert_equal_weights,
    bf16_environment,
    last_checkpoint,
    losses,
    metrics,
    stored,
    weights,
)
from tests.helpers.run_configs import config

ROLE = {"name": "role", "lr": 0.03}
ESTIMATORS = {
    "topk": {**ROLE, "estimator": "topk", "top_k": 4},
    "factorized": {**ROLE, "estimator": "factorized", "rank": 4, "class_lr": 0.01},
    "network": {**ROLE, "estimator": "network", "hidden": 8, "class_lr": 0.01},
}
EN, EN_K = {"name": "en_cl"}, 2.4
SGD = {"optimizer": "sgd", "lr": 0.02}
KINDS = {"zero0": {}, "zero1": {"deepspeed": "zero1"}, "zero2": {"deepspeed": "zero2"}, "bf16": {"precision": "bf16"}}


@pytest.fixture(scope="module")
def wnids(tmp_path_factory) -> Path:
    """ImageNet's layout: train/WNID/*.JPEG (96 images of 6 classes) and val/WNID/*.JPEG, packed."""
    folder = tmp_path_factory.mktemp("imagenet")
    for split, count in (("train", 16), ("val", 4)):
        for c in range(6):
            for i in range(count):
                path = folder / split / f"n0000000{c}" / f"n0000000{c}_{i}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = np.random.RandomState(100 * c + i).randint(0, 60, (36, 40, 3)) + 30 * c
                Image.fromarray(pixels.astype(np.uint8)).save(path)
        pack(imagenet.read(str(folder / split)), str(folder / f"{split}-shards"),
             Layout(streams=1, rows_per_shard=8 if split == "train" else 12), workers=1)
    return folder


def job(shards: Path, name: str, method: dict, train: dict | None = None, phases: int = 1, epochs: int = 2,
        **phase) -> dict:
    body = config(shards, name, **phase)
    body["data"] |= {"image_size": 16, "test": None}
    body["data"]["train"]["labels"] = "single"
    body["method"] = method
    if method is EN:
        body["model"]["expected_positives"] = EN_K
    body["phases"] = body["phases"][-phases:]
    body["phases"][-1] |= {"epochs": epochs, "schedule": "constant"}
    if phases == 1:
        body["data"]["val"] = None
    body["train"] |= {"ema_decay": 0.0, "trace_samples": False, **(train or {})}
    return {"config": body}


def imagenet_job(wnids: Path, name: str) -> dict:
    """A linear warm-up with AN, then EN+SCL on the maps of 3 classes an image."""
    return {"config": {
        "name": name,
        "data": {"train": {"url": str(wnids / "train-shards")}, "val": {"url": str(wnids / "val-shards")},
                 "image_size": 16, "normalize": "centered", "streams": 2, "open_shards": 2,
                 "augment": {"crop": "random_resized"}},
        "model": {"backbone": "lacuna:tiny", "expected_positives": 1.22},
        "method": {"name": "en_scl", "start_phase": 1, "top_k": 3},
        "phases": [{"name": "linear", "epochs": 1, "batch": 16, "lr": 1e-3, "trainable": "head"},
                   {"name": "all", "epochs": 3, "batch": 16, "lr": 1e-3, "schedule": "cosine"}],
        "train": {"log_every": 1, "checkpoint_every": "4st"},
    }}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, single_shards, wnids) -> Path:
    """Every run of this file, done."""
    folder = tmp_path_factory.mktemp("many")
    first, again, alone = [], [], []
    for name, method in ESTIMATORS.items():
        first.append(job(single_shards, f"{name}-reference", method, phases=2))
        first.append(job(single_shards, f"{name}-2", method, **SGD))
        alone.append(job(single_shards, f"{name}-1", method, **SGD))
    first += [job(single_shards, kind, ROLE, train, epochs=1, **SGD) for kind, train in KINDS.items()]
    first.append(job(single_shards, "pieces-role", ROLE, {"micro_batch": 5}, epochs=1, **SGD))
    first.append(job(single_shards, "whole-scl", {"name": "epr_scl"}, epochs=1, **SGD))
    alone.append(job(single_shards, "whole-role", ROLE, epochs=1, **SGD))
    alone.append(job(single_shards, "pieces-scl", {"name": "epr_scl"}, {"micro_batch": 5},
                     epochs=1, **SGD))
    alone.append({**job(single_shards, "en-1", EN, epochs=3), "record": True})
    first.append(imagenet_job(wnids, "imagenet-reference"))
    for name, method in ESTIMATORS.items():
        again.append(job(single_shards, f"{name}-left", method, phases=2))
    again.append({**job(single_shards, "en-2", EN, epochs=3), "record": True})
    again.append(imagenet_job(wnids, "imagenet-killed"))
    # Left inside the second epoch of the second phase, and of three; two steps after a checkpoint.
    stops = [{"leave": 42}] * len(ESTIMATORS) + [{"leave": 22}, {"kill": 15}]
    first += [{**body, **stop} for body, stop in zip(again, stops, strict=True)]

    launch = Launch.many(first, "first", folder, 2, **bf16_environment())
    assert launch.wait(900) != 0, "the last run was not killed"
    assert not (folder / "imagenet-killed" / "results.json").exists()
    assert (folder / "imagenet-killed" / "metrics.jsonl").exists(), launch.text()[-5000:]
    for jobs, name, ranks in ((again, "again", 2), (alone, "alone", 1)):
        launch = Launch.many(jobs, name, folder, ranks, **bf16_environment())
        launch.ok(900)
    return folder


def same_run(folder: Path, one: str, two: str) -> None:
    assert_equal_weights(folder / one, folder / two)
    assert timeless(metrics(folder / one)) == timeless(metrics(folder / two))
    assert json.loads((folder / one / "results.json").read_text()) == json.loads(
        (folder / two / "results.json").read_text())
    if not (folder / one / "state").exists():
        return
    expected, found = stored(folder / one), stored(folder / two)
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], name)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_that_was_interrupted_ends_as_if_it_had_not_been(folder, name):
    same_run(folder, f"{name}-reference", f"{name}-left")
    states = [method_state(folder / f"{name}-{kind}") for kind in ("reference", "left")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_gives_the_same_on_one_and_two_ranks(folder, name):
    one, two = folder / f"{name}-1", folder / f"{name}-2"
    assert len(losses(one)) == 32
    np.testing.assert_allclose(losses(one), losses(two), atol=1e-5)
    np.testing.assert_allclose(travel(one), travel(two), atol=1e-4)
    assert travel(one)[-1] > 0.05
    expected = method_state(two)
    for key, value in method_state(one).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-3)
    if name == "network":
        return
    rows = stored(two)
    for field, values in stored(one).items():
        np.testing.assert_allclose(values, rows[field], atol=1e-3, err_msg=field)


def test_zero_and_bf16_change_phi_by_rounding_only(folder):
    expected = stored(folder / "zero0")
    moved = np.abs(expected["phi_m"]).max()
    for kind in list(KINDS)[1:]:
        found = stored(folder / kind)
        np.testing.assert_array_equal(found["visit"], expected["visit"])
        exact = kind != "bf16"
        # bf16 has 8 bits of p's logit; Adam's first step is lr whatever the gradient's size, so signs could differ.
        assert np.abs(found["phi_m"] - expected["phi_m"]).max() < (1e-6 if exact else 0.05) * moved
        difference = np.abs(found["phi"] - expected["phi"])
        assert difference.max() < (1e-5 if exact else 2 * ROLE["lr"])
        assert difference.mean() < (1e-6 if exact else 1e-3)
    assert losses(folder / "bf16") != losses(folder / "zero0"), "bf16 was not on"


@pytest.mark.parametrize("method", ["role", "scl"])
def test_accumulation_of_a_coupled_loss_equals_the_whole_batch(folder, method):
    """role: in pieces on 2 ranks; scl (with score maps): in pieces on 1 rank."""
    whole, pieces = folder / f"whole-{method}", folder / f"pieces-{method}"
    np.testing.assert_allclose(losses(whole), losses(pieces), atol=1e-5)
    learnt = weights(pieces)
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, learnt[name], rtol=1e-4, atol=1e-5)
    expected, found = stored(whole), stored(pieces)
    for name, values in expected.items():
        off = np.abs(found[name].astype(np.float64) - values.astype(np.float64))
        if values.dtype == np.uint8:  # rounded stochastically: a rounding error may tip a value over
            assert off.max() <= 1
            assert (off > 0).mean() <= 1e-3
        else:
            assert off.max() < 1e-3, name


@pytest.mark.parametrize("run", ["en-1", "en-2"])
def test_en_masks_are_the_top_p_of_the_stores_own_scores(folder, single_shards, run):
    """en-2 was left inside its second epoch and resumed: its masks come from both halves."""
    index = ShardIndex.load(str(single_shards / "train"))
    sidecar = Sidecar.load(index, "single")
    z = np.concatenate([sidecar.labels(s).dense(len(index.classes)) for s in range(len(index.shards))])
    count = (z == POSITIVE).sum(0)
    quotas = np.clip(np.rint(EN_K * count).astype(int), count, len(z))
    first = np.concatenate([[0], np.cumsum(index.counts)])
    records = [np.load(path) for path in sorted((folder / run).glob("selected-*.npz"))]
    assert len(records) == {"en-1": 1, "en-2": 4}[run]
    for epoch in (1, 2):
        scores = np.load(folder / run / f"scores-{epoch}.npy")
        chosen, seen = np.zeros(z.shape, bool), np.zeros(len(z), int)
        for record in records:
            mine = record["epochs"] == epoch
            at = first[record["shards"][mine]] + record["rows"][mine]
            twice = seen[at] > 0
            np.testing.assert_array_equal(chosen[at][twice], record["chosen"][mine][twice], "after the resume")
            chosen[at] = record["chosen"][mine]
            np.add.at(seen, at, 1)
        assert seen.min() == 1, "a sample was never looked at"
        np.testing.assert_array_equal(chosen.sum(0), quotas)
        for i in range(z.shape[1]):
            assert scores[chosen[:, i], i].min() >= scores[~chosen[:, i], i].max()


def test_imagenet_to_spatial_consistency_survives_a_kill(folder):
    """Class folders → shards → linear warm-up → EN+SCL with top-k maps on 2 ranks → SIGKILL → resume → evaluation."""
    same_run(folder, "imagenet-reference", "imagenet-killed")
    state = stored(folder / "imagenet-killed")
    ids = state["heat_ids"]
    assert ids.shape == (96, 3)
    assert (ids != UNTRACKED).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())
    results = json.loads((folder / "imagenet-killed" / "results.json").read_text())
    assert 0 < results["val"]["map"] <= 100
    phases = [line["phase"] for line in metrics(folder / "imagenet-killed", "epoch")]
    assert phases == ["linear", "all", "all", "all"]


def method_state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(last_checkpoint(folder) / "method.safetensors")


def travel(folder: Path) -> list[float]:
    return [line["phi_travel"] for line in metrics(folder, "train")]
