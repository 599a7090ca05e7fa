"""Configs of short runs over the digit scenes, as dicts that a test may change before it launches them."""

from __future__ import annotations

from pathlib import Path

METHODS = {
    "en_scl": {"name": "en_scl", "start_phase": 1},
    "role": {"name": "role", "lr": 0.03},
}


def config(shards: Path, name: str, **phase) -> dict:
    return {
        "name": name,
        "data": {
            "train": {"url": str(shards / "train")}, "val": {"url": str(shards / "val")},
            "test": {"url": str(shards / "test")}, "image_size": 32, "normalize": "centered", "streams": 4,
            "open_shards": 2, "augment": {"crop": "random_resized", "flip": True},
        },
        "model": {"backbone": "lacuna:tiny", "expected_positives": 2.2, "head_norm": "l2"},
        "method": {"name": "epr"},
        "phases": [
            {"name": "linear", "epochs": 1, "batch": 32, "lr": 1e-3, "trainable": "head", **phase},
            {"name": "all", "epochs": 2, "batch": 32, "lr": 1e-3, "schedule": "cosine", **phase},
        ],
        "train": {"log_every": 1, "checkpoint_every": "5st", "ema_decay": 0.9, "trace_samples": True,
                  "clip_norm": 1.0},
    }


def method_config(shards: Path, name: str, method: str, **phase) -> dict:
    body = config(shards, name, **phase)
    body["data"]["train"]["labels"] = "single"
    body["method"] = METHODS[method]
    body["train"]["ema_decay"] = 0.0
    return body


def en_scl_config(shards: Path, name: str) -> dict:
    """Two epochs of 13 steps, with state from the first on. Plain SGD shows that a resume is exact to rounding."""
    body = method_config(shards, name, "en_scl", optimizer="sgd", lr=0.02)
    body["phases"] = [{**body["phases"][1], "epochs": 2}]
    body["method"] = {**body["method"], "start_phase": 0}
    return body
