"""Shared by the tests of commands that look at finished runs: two real ones, trained once, and a browser."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.browser import Browser
from tests.helpers.launching import Launch


@dataclass(frozen=True)
class Trained:
    """EN+SCL from one label an image, and the same model from all labels; every epoch's checkpoint is kept."""

    data: Path
    scl: str
    full: str


@pytest.fixture(scope="session")
def trained(single_shards, tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "data"
    shutil.copytree(single_shards, data)
    common = {"data": {**{split: {"url": str(data / split)} for split in ("train", "val", "test")}, "image_size": 32,
                       "normalize": "centered", "streams": 4, "augment": {"flip": False}},
              "model": {"backbone": "lacuna:tiny", "head_norm": "l2"}, "train": {"log_every": 5, "keep": 9},
              "phases": [{"name": "only", "epochs": 3, "batch": 32, "lr": 3e-3}]}
    single = {**common["data"]["train"], "labels": "single"}
    launches = [Launch({"name": "scl", **common, "data": {**common["data"], "train": single},
                        "method": {"name": "en_scl", "gamma": 0.1}}, folder, 1),
                Launch({"name": "full", **common, "method": {"name": "bce"}}, folder, 1)]
    for launch in launches:
        launch.ok(600)
    return Trained(data, str(launches[0].folder), str(launches[1].folder))


@pytest.fixture(scope="session")
def browser():
    made = Browser()
    yield made
    made.close()
