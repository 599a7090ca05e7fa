"""On an accelerator no method makes the host wait inside a step, mixes devices, or trains differently: counted on a
pretended device that holds real values, with the real loop, store and DeepSpeed engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lacuna.basics.places import CONFIGS
from lacuna.trainer.methods import METHODS
from lacuna.trainer.priors import write_prior
from tests.helpers import launching, pretended_device
from tests.helpers.method_runs import SETTINGS, config, make_data

SCRIPT = str(Path(launching.__file__).parent / "pretended_runs.py")
# name → (method, its settings, keys of the train section)
VARIANTS: dict[str, tuple[str, dict, dict]] = {
    "role-topk": ("role", {"estimator": "topk", "top_k": 4}, {}),
    "role-factorized": ("role", {"estimator": "factorized", "rank": 3}, {}),
    "role-network": ("role", {"estimator": "network", "hidden": 5}, {}),
    "role-sgd": ("role", {"optimizer": "sgd"}, {}),
    "role-rowwise": ("role", {"optimizer": "rowwise", "phi_dtype": "float16"}, {}),
    "role-pieces": ("role", {}, {"micro_batch": 5}),
    "en_scl-topk": ("en_scl", {"top_k": 3}, {}),
    "en-cardinality": ("en", {"cardinality": [0.5, 0.3, 0.2]}, {}),
    "en_cl-fine": ("en_cl", {"score_dtype": "uint16", "distance": "jsd"}, {"micro_batch": 5}),
    "csl-prior": ("csl", {"budget": "per_image", "prior": "prior.csv", "soft_prior": 1.0}, {}),
    "scpnet-relation": ("scpnet", {"relation": "relation.npy"}, {}),
    "crisp-batch": ("crisp", {"positive_mean": "batch"}, {}),
    "ccd-unsure": ("ccd", {"unsure_weight": 0.1, "floor": 0.1}, {}),
    "se-median": ("se", {"nearest": "median", "side": "negative", "normalize": "separate"}, {}),
    "mime-variational": ("mime", {}, {}),
    "scob-masked": ("scob", {}, {}),
    "lac-queries": ("lac", {}, {}),
    "an-pieces": ("an", {}, {"micro_batch": 5, "ema_decay": 0.9}),
    "an-clip": ("an", {}, {"clip_norm": 0.01}),
    # Several ranks and files of one's own use DeepSpeed's engine as it is; the others do without its wrappers.
    "an-engine": ("an", {}, {"deepspeed": "own.json", "micro_batch": 5, "clip_norm": 0.01}),
    "role-engine": ("role", {}, {"deepspeed": "own.json"}),
}
# name → keys of the model section and of the phase
HEADS: dict[str, tuple[dict, dict]] = {
    "mime-variational": ({"head": "variational", "decoder": {"width": 16, "feedforward": 24}}, {"optimizer": "adamax"}),
    "lac-queries": ({"head": "query2label", "decoder": {"width": 16, "feedforward": 24}}, {}),
    "scob-masked": ({"head": "masked_transformer", "decoder": {"width": 16, "feedforward": 24, "earlier": "4"}},
                    {"trainable": "head"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every method and variant on the device (`pretended`) and on the host (`cpu`)."""
    folder = tmp_path_factory.mktemp("device")
    make_data(folder)
    np.save(folder / "relation.npy", np.full((10, 10), 0.1, np.float32))
    write_prior(str(folder / "prior.csv"), "0123456789", np.arange(10) / 10)
    shutil.copy(Path(CONFIGS) / "deepspeed" / "zero0.json", folder / "own.json")
    for device in (pretended_device.NAME, "cpu"):
        jobs = folder / f"{device}.json"
        jobs.write_text(json.dumps(configs(folder, device)))
        launch = launching.launches.Launch(
            launching.command(1, str(jobs), str(folder / f"{device}-found.json"), device, script=SCRIPT),
            str(folder / f"{device}.out"), launching.environment(), str(folder))
        assert launch.wait(1800) == 0, launch.text()[-5000:]
    return folder


def configs(folder: Path, device: str) -> list[dict]:
    found = []
    for name in (*METHODS, *VARIANTS):
        method, settings, train = VARIANTS.get(name, (name, {}, {}))
        body = config(folder, method)
        for key in ("prior", "relation"):
            if key in settings:
                settings = {**settings, key: str(folder / settings[key])}
        body["name"], body["run_folder"] = name, str(folder / device)
        body["method"] |= settings
        body["train"] |= {"log_every": 1000, **train}
        model, phase = HEADS.get(name, ({}, {}))
        body["model"], body["phases"] = {**body["model"], **model}, [{**body["phases"][0], **phase}]
        if "deepspeed" in train:
            body["train"]["deepspeed"] = str(folder / train["deepspeed"])
        found.append(body)
    assert set(SETTINGS) <= set(METHODS)
    return found


@pytest.fixture(scope="module")
def on_device(folder) -> dict:
    return json.loads((folder / f"{pretended_device.NAME}-found.json").read_text())


@pytest.fixture(scope="module")
def on_host(folder) -> dict:
    return json.loads((folder / "cpu-found.json").read_text())


def test_the_device_notices(tmp_path):
    """What must be counted is counted, what must fail fails, and what does not block arrives late."""
    script = """
import torch
from tests.helpers import pretended_device as pretended
device = pretended.register()
x = torch.arange(6.0).to(device)
seen = {}
def count(name, action):
    pretended.RECORD.waits.clear()
    with pretended.RECORD.step():
        action()
    seen[name] = len(pretended.RECORD.waits)
with pretended.OnDevice():
    for name, action in {
        "item": lambda: x[0].item(), "bool": lambda: bool(x[0] > 1), "cpu": lambda: x.cpu(), "list": lambda: x.tolist(),
        "mask": lambda: x[x > 2], "nonzero": lambda: x.nonzero(), "unique": lambda: x.unique(),
        "indices": lambda: x[[0, 2]], "up": lambda: torch.ones(3).to(device),
        "made": lambda: torch.tensor(1.0, device=device),
    }.items():
        count(name, action)
    for name, action in {
        "sum": lambda: (x * 2).sum(), "where": lambda: torch.where(x > 2, x, 0.0),
        "gather": lambda: x.gather(0, x.long()),
        "up later": lambda: torch.ones(3).to(device, non_blocking=True), "new": lambda: torch.zeros(3, device=device),
        "down later": lambda: x.to("cpu", non_blocking=True),
    }.items():
        count("no " + name, action)
    try:
        x + torch.ones(6)
    except RuntimeError:
        seen["mixed"] = 1
    late = x.to("cpu", non_blocking=True)
    early = late.tolist()
    torch.pretended.synchronize()
    seen["late"] = int(early != late.tolist() == x.tolist())
assert all(n == (0 if name.startswith("no ") else 1) for name, n in seen.items()), seen
assert len(seen) == 18
"""
    path = tmp_path / "notices.py"
    path.write_text(script)
    launch = launching.launches.Launch(launching.command(1, script=str(path)), str(tmp_path / "out"),
                                       launching.environment(), str(tmp_path))
    assert launch.wait(600) == 0, launch.text()[-3000:]


@pytest.mark.parametrize("name", [*METHODS, *VARIANTS])
def test_a_step_waits_for_nothing(on_device, name):
    assert "failed" not in on_device[name], on_device[name]["failed"]
    steps = on_device[name]["steps"]
    assert len(steps) == 6
    # What a method keeps on the device is carried there in the first step of a run.
    worst = max(steps[1:], key=lambda waits: sum(waits.values()))
    assert not worst, "\n".join(f"{n} × {wait}" for wait, n in worst.items())


@pytest.mark.parametrize("name", [*METHODS, *VARIANTS])
def test_trains_as_on_the_host(on_device, on_host, name):
    """Bit for bit, also what a snapshot inside an epoch holds: the pretended device computes with the host's kernels,
    so that only our own paths could differ."""
    for what in ("losses", "weights", "rows", "snapshot"):
        assert on_device[name][what] == on_host[name][what], what


@pytest.mark.parametrize("name", ["role", "role-pieces", "en_cl", "en_scl-topk"])
def test_rows_are_gathered_ahead(on_device, name):
    """All but the first batch of an epoch and those that open a shard."""
    assert on_device[name]["ahead"] >= 1
