"""One finished EN+SCL run, trained once through the API in this process; every epoch's checkpoint is kept."""

from __future__ import annotations

import pytest
import yaml

import lacuna


@pytest.fixture(scope="session")
def finished(single_shards, tmp_path_factory) -> lacuna.Results:
    folder = tmp_path_factory.mktemp("finished")
    body = {"name": "scl", "run_folder": str(folder),
            "data": {"train": {"url": str(single_shards / "train"), "labels": "single"},
                     **{split: {"url": str(single_shards / split)} for split in ("val", "test")}, "image_size": 32,
                     "normalize": "centered", "streams": 4, "open_shards": 1, "augment": {"flip": False}},
            "model": {"backbone": "lacuna:tiny"}, "method": {"name": "en_scl", "gamma": 0.1},
            "phases": [{"name": "only", "epochs": 2, "batch": 32, "lr": 3e-3}],
            "train": {"log_every": 5, "keep": 99, "checkpoint_every": "3st"}}
    path = folder / "scl.yaml"
    path.write_text(yaml.safe_dump(body))
    return lacuna.train(lacuna.load_config(str(path)))
