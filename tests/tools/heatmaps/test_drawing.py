"""Proves that sheets can be read: captions stay in their own cell, annotated maps of a real run are no red wash."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

import lacuna
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.heatmaps.drawing import draw_strip, overlay
from lacuna.tools.heatmaps.now import maps_now
from lacuna.tools.heatmaps.seen import SeenMap


def test_captions_stay_in_their_cell():
    names = ["a rather long class name with many words in it", "Ähre, Müll, 猫の名前はとても長いので切れる", "x"]
    maps = {i: SeenMap(np.full((4, 4), 0.5, np.float32), np.zeros((4, 4), bool), 0.31) for i in range(3)}
    strip = draw_strip(torch.zeros(3, 20, 30, dtype=torch.uint8), "folder/key-of-a-sample-that-is-very-long-indeed.jpg",
                       maps, names, {0, 1, 2}, 3)
    pixels = np.asarray(strip)
    cell, gap = 144, 8
    for i in range(4):
        between = pixels[:, i * (cell + gap) + cell : (i + 1) * (cell + gap)]
        assert (between == 255).all(), f"something is written right of cell {i}"
        assert (pixels[:14, i * (cell + gap) : i * (cell + gap) + cell] < 255).any(), f"cell {i} has no caption"


def test_unseen_cells_are_hatched_and_not_red():
    grey = Image.new("RGB", (64, 64), (90, 90, 90))
    unseen = np.zeros((4, 4), bool)
    unseen[0] = True
    drawn = np.asarray(overlay(grey, SeenMap(np.where(unseen, 0, 0.9).astype(np.float32), unseen))).astype(int)
    top, below = drawn[:8], drawn[40:]
    assert (top.reshape(-1, 3) == 255).all(1).any()
    assert (below[..., 0] > below[..., 2] + 50).all()
    assert not (below.reshape(-1, 3) == 255).all(1).any()


def test_a_sheet_of_a_run(trained, tmp_path):
    out = tmp_path / "sheet.png"
    assert main(["heatmaps", trained.scl, "--out", str(out), "--rows", "0", "1", "--classes", "10"]) == 0
    pixels = np.asarray(Image.open(out)).astype(int)
    assert pixels.shape == (2 * (144 + 28 + 8), 11 * 152, 3)
    for row in range(2):
        for cls in range(1, 11):
            cell = pixels[row * 180 + 28 : row * 180 + 172, cls * 152 : cls * 152 + 144]
            red = cell[..., 0] - cell[..., 1] > 60
            assert red.mean() < 0.9, "a map that is red all over says nothing"


def test_of_a_method_that_keeps_no_maps_the_models_own_are_drawn(trained, tmp_path, capsys):
    out = tmp_path / "sheet.png"
    assert main(["heatmaps", trained.full, "--out", str(out), "--rows", "0", "3", "--classes", "2"]) == 0
    assert np.asarray(Image.open(out)).shape == (2 * 180, 3 * 152, 3)
    source = ShardSource.load(str(trained.data / "train"), "labels", None)
    opened = source.open(0)
    maps = maps_now(trained.full, source, [decode_image(opened.read(row)) for row in (0, 3)])
    assert [set(found) for found in maps] == [set(range(10))] * 2
    predicted = lacuna.open_run(trained.full).predict(str(trained.data / "train"))
    places = [predicted.keys.index(opened.members.keys[row]) for row in (0, 3)]
    peaks = np.array([[found[cls].peak for cls in range(10)] for found in maps])
    scores = predicted.scores[places]
    assert ((np.abs(peaks - scores) < 1e-4) | (peaks == 0)).all()  # 0: no cell speaks for the class
    assert (peaks > 0).sum() > 10
    capsys.readouterr()
    assert main(["heatmaps", trained.full, "--snapshot", "step-00000001"]) == 2
    assert "keeps no heatmaps" in capsys.readouterr().err
