"""Proves that open_clip's models score as a naive loop over images, crops, classes and prompts does, and can go on."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from torchvision.transforms.v2.functional import resize

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.scores.clip import ClipModel
from lacuna.tools.scores.job import OutsideJob
from lacuna.tools.scores.looking import Views
from tests.helpers.small_clip import small_clip

PROMPTS = ("a photo of the digit {}.", "{}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("clip")
    small_clip(made / "clip")
    small_clip(made / "siglip", bias=-3.0)
    (made / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return made


def naive(model_folder: Path, source: ShardSource, shard: int, grid: int, sigmoid: bool) -> dict[str, np.ndarray]:
    name = f"local-dir:{model_folder}"
    model, tokenize = open_clip.create_model(name).eval(), open_clip.get_tokenizer(name)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
    texts = []
    for cls in source.index.classes:
        one = [model.encode_text(tokenize([prompt.replace("{}", cls)]))[0] for prompt in PROMPTS]
        middle = sum(vector / vector.norm() for vector in one) / len(one)
        texts.append(middle / middle.norm())

    def scores(pixels: torch.Tensor) -> np.ndarray:
        small = resize(pixels, [32, 32], interpolation=3, antialias=True)  # bicubic
        image = model.encode_image(((small / 255 - mean) / std)[None])[0]
        logits = [float(model.logit_scale.exp() * (image / image.norm()) @ text) for text in texts]
        if sigmoid:
            return np.array([1 / (1 + np.exp(-(logit + float(model.logit_bias)))) for logit in logits])
        return np.exp(logits) / np.exp(logits).sum()

    found: dict[str, list] = {"scores": [], "global": [], "crop_max": [], "crop_min": []}
    opened = source.open(shard)
    with torch.no_grad():
        for row in range(len(opened.members.keys)):
            image = decode_image(opened.read(row))
            tall, wide = image.shape[1] // grid, image.shape[2] // grid
            crops = [scores(image[:, y * tall:(y + 1) * tall, x * wide:(x + 1) * wide])
                     for y in range(grid) for x in range(grid)]
            whole = scores(image)
            for table, value in (("scores", whole), ("global", whole), ("crop_max", np.max(crops, 0)),
                                 ("crop_min", np.min(crops, 0))):
                found[table].append(value)
    return {table: np.array(values) for table, values in found.items()}


def test_tables_of_a_whole_dataset(folder, digit_shards, tmp_path, capsys):
    """Through Ray into a store; a second run takes the parts that are there and makes the one that is not."""
    shards, parts, out = str(digit_shards / "test"), tmp_path / "parts", str(tmp_path / "table")
    argv = ["scores", f"open_clip:local-dir:{folder}/clip", "--prompts", str(folder / "prompts.txt"), "--crops",
            "grid:2", "--shards", shards, "--dtype", "float32", "--workers", "1", "--parts", str(parts), "--json"]
    assert main([*argv, "--out", out]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tables"] == ["scores", "global", "crop_max", "crop_min"]
    assert (report["samples"], report["unreadable"]) == (60, 0)
    source = ShardSource.load(shards, "labels", None)
    store = state_store.open(out)
    reader = store.reader(store.snapshots()[-1].name)
    expected = naive(folder / "clip", source, 1, 2, sigmoid=False)
    for table, values in expected.items():
        np.testing.assert_allclose(reader.read_shard(table, 1), values, atol=2e-5)
    assert np.ptp(expected["scores"]) > 0.05

    text = np.load(out + ".text.npz")
    assert text["classes"].tolist() == source.index.classes
    assert text["embeddings"].shape == (10, 16)
    np.testing.assert_allclose(np.linalg.norm(text["embeddings"], axis=1), 1, atol=1e-6)

    made = sorted(parts.iterdir())
    assert len(made) == len(source.index.shards)  # one file for each
    before = {path.name: path.stat().st_mtime_ns for path in made}
    made[1].unlink()
    assert main([*argv, "--out", out + "2"]) == 0
    again = {path.name: path.stat().st_mtime_ns for path in sorted(parts.iterdir())}
    assert [name for name in before if before[name] != again[name]] == [made[1].name]
    second = state_store.open(out + "2")
    np.testing.assert_array_equal(second.reader(second.snapshots()[-1].name).read_shard("crop_min", 1),
                                  reader.read_shard("crop_min", 1))
    assert main([*argv, "--out", out]) == 2
    assert "there is already a store" in capsys.readouterr().err


def test_a_model_that_was_trained_with_sigmoids(folder, digit_shards):
    source = ShardSource.load(str(digit_shards / "test"), "labels", None)
    model = ClipModel(f"local-dir:{folder}/siglip", "none", templates=PROMPTS, names=tuple(source.index.classes))
    found = OutsideJob(model.prepared(), source, Views(grid=2)).build()(0)
    for table, values in naive(folder / "siglip", source, 0, 2, sigmoid=True).items():
        np.testing.assert_allclose(found[table], values, atol=2e-5)


def test_temperature_activation_and_weights_are_part_of_a_pass(folder, digit_shards, tmp_path):
    source = ShardSource.load(str(digit_shards / "test"), "labels", None)
    plain = ClipModel(f"local-dir:{folder}/clip", "none", templates=PROMPTS, names=tuple(source.index.classes))
    jobs = [OutsideJob(model, source, views) for model, views in (
        (plain, Views()), (plain, Views(grid=2)), (plain, Views(random=2)), (plain, Views(random=2, seed=1)),
        (plain, Views("center")), (ClipModel(plain.name, "none", templates=PROMPTS, names=("x",) * 10), Views()),
        (ClipModel(plain.name, "none", "another file", templates=PROMPTS, names=plain.names), Views()),
        (ClipModel(plain.name, "none", temperature=0.1, templates=PROMPTS, names=plain.names), Views()))]
    assert len({job.fingerprint for job in jobs}) == len(jobs)


def test_boxes():
    views = Views("center", grid=2, random=3)
    boxes = views.boxes(50, 101, key=7)
    assert boxes[:5] == [(0, 25, 50, 50), (0, 0, 25, 50), (0, 50, 25, 51), (25, 0, 25, 50), (25, 50, 25, 51)]
    assert len(boxes) == 8
    for top, left, tall, wide in boxes:
        assert 0 <= top < top + tall <= 50
        assert 0 <= left < left + wide <= 101
    assert views.boxes(50, 101, key=8)[5:] != boxes[5:]
    assert Views(grid=4).boxes(2, 2, key=0)[1:] == [
        (y, x, 1, 1) for y in (0, 0, 1, 1) for x in (0, 0, 1, 1)]  # smaller than the grid


@pytest.mark.parametrize(("options", "message"), [
    (["open_clip:ViT-B-32"], "--weights: name a file or a tag"),
    (["open_clip:ViT-B-32", "--weights", "none.pt"], "open_clip:ViT-B-32 with --weights none.pt: .* not a known tag"),
    (["open_clip:local-dir:nowhere"], "open_clip:local-dir:nowhere with --weights default: .*not found"),
    (["open_clip:ViT-B-32", "--weights", "openai", "--prompts", "none.txt"], "--prompts none.txt: no such file"),
    (["open_clip:ViT-B-32", "--weights", "openai", "--crops", "grid"], "--crops grid: write grid:G"),
    (["open_clip:ViT-B-32", "--weights", "openai", "--temperature", "0"], "--temperature 0.0: a number above 0"),
    (["nowhere"], "nowhere.*not a run folder")])
def test_mistakes(digit_shards, tmp_path, options, message, capsys):
    argv = ["scores", *options, "--shards", str(digit_shards / "test"), "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_without_the_package(monkeypatch, digit_shards):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(UserError, match=r"open_clip_torch: `pip install 'lacuna-trainer\[clip\]'`"):
        ClipModel("ViT-B-32", "openai", names=("a",)).prepared()


def test_feature_shards_and_damaged_images(folder, digit_shards, tmp_path):
    """An image that cannot be decoded keeps its row, with zeros, and is named."""
    broken = tmp_path / "broken"
    shutil.copytree(digit_shards / "test", broken)
    source = ShardSource.load(str(broken), "labels", None)
    members = source.index.members(0)
    with open(broken / source.index.shards[0].name, "r+b") as tar:
        tar.seek(int(members.offsets[3]))
        tar.write(b"\0" * int(members.sizes[3]))
    model = ClipModel(f"local-dir:{folder}/clip", "none", names=tuple(source.index.classes)).prepared()
    found = OutsideJob(model, source, Views()).build()(0)
    assert found["rows"].tolist() == [row for row in range(len(members.keys)) if row != 3]
    assert json.loads(found["bad"].tobytes())[0]["key"] == members.keys[3]
