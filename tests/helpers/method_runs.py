"""What runs of every method on small shards of digit scenes share: the data, the settings, and the configs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.trainer.methods import example
from tests.helpers.neighborhoods import make_neighborhood

SAMPLES, STEPS = 48, 6  # two epochs of three steps
# Settings without which a method has nothing to do in so short a run.
SETTINGS: dict[str, dict] = {
    "role": {"lr": 0.03}, "ls": {"temperature": 3.0},
    "csl": {"budget": "batch", "top": 2}, "ll_r": {"delta_percent": 5.0}, "ll_ct": {"delta_percent": 5.0},
    "ll_cp": {"delta_percent": 5.0}, "em_apl": {"warmup_epochs": 1}, "cap": {"warmup_epochs": 1},
    "mime": {"warmup_epochs": 1, "threshold": 0.3},
    "ignore": {"first_epoch": 1}, "lac": {"contrast_phase": 0, "contrast_threshold": 0.5, "queue": 32},
    "scpnet": {"base_threshold": 0.5}, "scob": {"lr": 0.03},
    "gpr": {"threshold": 0.1},
    "aevlp": {"threshold": 0.1}, "ccd": {"crops": True, "late_epoch": 1},
}


def make_data(folder: Path) -> None:
    """Shards with one positive and one negative a scene, score tables and neighbours of them."""
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
        "name": name + suffix, "method": {"name": name, **settings},
        "model": {"backbone": "lacuna:tiny", "expected_positives": 2.2, "head_bias": "default"},
        "data": {"train": {"url": str(data / "train"), "labels": labels}, "image_size": 32, "normalize": "centered",
                 "streams": 2, "open_shards": 2, "augment": {"crop": "random_resized"}, "strong_augment": strong},
        "phases": [{"name": "all", "epochs": 2, "batch": 16, "lr": 1e-3}],
        "train": {"log_every": 1, "checkpoint_every": "4st" if suffix else "1ep"},
    }
