"""A world of one trains as DeepSpeed's own forward, backward and step would, bit for bit, also after a resume by the
other of the two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lacuna.basics.places import CONFIGS
from lacuna.tools.launches import timeless
from tests.helpers.launching import last_checkpoint, metrics
from tests.helpers.small_runs import Trainer, body, make_data


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("alone")
    make_data(made)
    shutil.copy(Path(CONFIGS) / "deepspeed" / "zero0.json", made / "own.json")
    return made


def config(folder: Path, name: str, own: bool, settings: dict) -> dict:
    """`own`: with a DeepSpeed file of one's own, whose engine is used as it is."""
    found = body(folder, name)
    found["train"] |= {**settings, "deepspeed": str(folder / "own.json") if own else "zero0"}
    return found


def outcome(folder: Path) -> tuple:
    newest = last_checkpoint(folder)
    engine = torch.load(next(newest.glob("engine/*model_states.pt")), weights_only=False)
    counters = {key: engine[key] for key in ("global_steps", "global_samples", "skipped_steps")}
    return ({name: t.tolist() for name, t in load_file(newest / "model.safetensors").items()}, counters,
            timeless(metrics(folder)), json.loads((folder / "results.json").read_text()))


@pytest.mark.parametrize(("name", "settings"), [
    ("plain", {}), ("pieces", {"micro_batch": 5, "clip_norm": 0.05}), ("bf16", {"precision": "bf16"}),
])
def test_equals_the_engine(trainer, folder, name, settings):
    for own in (False, True):
        trainer.train(config(folder, f"{name}-{own}", own, settings))
    assert outcome(folder / f"{name}-False") == outcome(folder / f"{name}-True")


@pytest.mark.parametrize("first", [False, True])
def test_either_goes_on_with_what_the_other_wrote(trainer, folder, first):
    settings = {"micro_batch": 5}
    trainer.train(config(folder, f"left-{first}", first, settings), leave=7)
    trainer.train(config(folder, f"left-{first}", not first, settings))
    trainer.train(config(folder, f"whole-{first}", False, settings))
    assert outcome(folder / f"left-{first}") == outcome(folder / f"whole-{first}")
