"""The cells of the matrix: what is trained, with which ZeRO stage, on which storage; short runs with much to lose."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from lacuna.basics import storage
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits, features

# Dense state with moments, running scores with cut-offs, heatmaps of chosen classes, whole passes over the data at an
# epoch's start, and a loss over the global batch without any state.
METHODS: dict[str, dict] = {
    "role": {"name": "role", "lr": 0.03},
    "en_cl": {"name": "en_cl"},
    "en_scl": {"name": "en_scl", "top_k": 3},
    "em_apl": {"name": "em_apl", "warmup_epochs": 1},
    "csl": {"name": "csl", "budget": "batch", "top": 2},
}
STAGES = ("zero0", "zero1", "zero2")
STORAGES = ("local", "s3")
RANKS = (1, 2, 4)
_ROWS, _CLASSES, _WIDTH, _EPOCHS, _BATCH = 96, 10, 8, 4, 16
STEPS = _EPOCHS * _ROWS // _BATCH


@dataclass(frozen=True)
class Cell:
    method: str
    stage: str
    storage: str

    def __str__(self) -> str:
        return f"{self.method}-{self.stage}-{self.storage}"

    def config(self, data: str, runs: str, name: str, staging: str) -> dict:
        """`data` and `runs` are folders or URLs."""
        pictures = self.method == "en_scl"
        kind = storage.join(data, "pictures" if pictures else "features")
        look = {"image_size": 16, "normalize": "centered", "augment": {"crop": "random_resized"}} if pictures else {}
        return {
            "name": name, "run_folder": runs,
            "data": {"train": {"url": storage.join(kind, "train"), "labels": "single"},
                     "val": {"url": storage.join(kind, "val")}, "streams": 4, "open_shards": 2, "workers": 1, **look},
            "model": {"backbone": "lacuna:tiny" if pictures else "features", "expected_positives": 2.2},
            "method": METHODS[self.method],
            "phases": [{"name": "all", "epochs": _EPOCHS, "batch": _BATCH, "lr": 0.01}],
            "train": {"log_every": 1, "checkpoint_every": "3st", "keep": 3, "trace_samples": True,
                      "deepspeed": self.stage, "staging": staging, "timeout_seconds": 120},
        }


def make_data(folder: str) -> None:
    """Features and pictures, each with a training set of one positive per sample and a validation set."""
    draws = np.random.RandomState(3)
    truth = draws.randn(_WIDTH, _CLASSES)
    layout = Layout(streams=1, rows_per_shard=8)
    for split, rows in (("train", _ROWS), ("val", 24)):
        values = draws.randn(rows, _WIDTH).astype(np.float32)
        labels = (values @ truth + draws.randn(rows, _CLASSES) > 2).astype(np.int8)
        labels[:, 0] |= labels.sum(1) == 0
        os.makedirs(os.path.join(folder, "tables"), exist_ok=True)
        paths = [os.path.join(folder, "tables", f"{split}-{name}.npy") for name in ("values", "labels")]
        np.save(paths[0], values)
        np.save(paths[1], labels)
        pack(features.read(paths[0], paths[1], split=split), os.path.join(folder, "features", split), layout, workers=1)
        pack(digits.read(rows, split), os.path.join(folder, "pictures", split), layout, workers=1)
    for kind in ("features", "pictures"):
        index = ShardIndex.load(os.path.join(folder, kind, "train"))
        annotate(LabelledRows(index, Sidecar.load(index, "labels")), "single", "single_positive",
                 SCHEMES["single_positive"]())


def upload_data(folder: str, url: str) -> None:
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            storage.upload(path, storage.join(url, os.path.relpath(path, folder)))
