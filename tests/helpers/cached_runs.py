"""Short runs over a few digit scenes whose phase has a cache, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.tools.launches import timeless
from tests.helpers.launching import last_checkpoint, metrics

EPOCHS, STEPS = 3, 8


def make_scenes(folder: Path) -> Path:
    """train (110 scenes in 8 uneven shards) and val (20)."""
    for split, count in (("train", 110), ("val", 20)):
        pack(digits.read(count, split), str(folder / split), Layout(streams=1, rows_per_shard=15), workers=1)
    return folder


def without_tars(shards: Path) -> None:
    """Whoever still looks at an image fails."""
    for tar in [*(shards / "train").glob("*.tar"), *(shards / "val").glob("*.tar")]:
        tar.unlink()


def body(shards: Path, folder: Path, name: str, cache: dict | None, method: dict | None = None, **phase) -> dict:
    return {
        "name": name, "run_folder": str(folder),
        "data": {"train": {"url": str(shards / "train")}, "val": {"url": str(shards / "val")},
                 "image_size": 32, "normalize": "centered", "streams": 4, "open_shards": 2,
                 "augment": {"crop": "random_resized", "flip": True}},
        "model": {"backbone": "lacuna:tiny", "expected_positives": 2.2, "head_norm": "l2"},
        "method": method or {"name": "an"},
        "phases": [{"name": "linear", "epochs": EPOCHS, "batch": 16, "lr": 1e-2, "trainable": "head", "cache": cache,
                    **phase}],
        "train": {"log_every": 1, "checkpoint_every": "3st", "trace_samples": True},
    }


def outcome(folder: Path) -> tuple:
    weights = {name: t.tolist() for name, t in load_file(last_checkpoint(folder) / "model.safetensors").items()}
    return weights, timeless(metrics(folder)), json.loads((folder / "results.json").read_text())
