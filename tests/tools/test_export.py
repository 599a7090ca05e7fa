"""Proves that an exported model is the trained one: same scores as the trainer's evaluation, in torch and in ONNX."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.export import best_thresholds, export, export_onnx
from lacuna.tools.export.folder import Exported, empty_model, file_digest
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.scoring import ScoreJob, shard_rows
from lacuna.tools.passes.trained import Trained, load_model, open_trained
from lacuna.trainer import evaluate as evaluation
from lacuna.trainer.metrics.collector import ScoreCollector
from lacuna.trainer.scores import SIGMOID
from lacuna.trainer.world import World
from tests.helpers.damaged_shards import blank_out


def scored(run: Trained, source: ShardSource, folder: Path) -> Parts:
    """In this process (Ray does it in the long form)."""
    job = ScoreJob(run, source)
    work, parts = job.build(), Parts(str(folder), job.fingerprint)
    for shard in shard_rows(source):
        parts.write(shard, work(shard))
    return parts


@pytest.fixture(scope="module")
def val_parts(trained, tmp_path_factory) -> Parts:
    source = ShardSource.load(str(trained.data / "val"), "labels", None)
    return scored(open_trained(trained.scl), source, tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def model(trained, val_parts, tmp_path_factory) -> str:
    """Exported with thresholds of the validation set."""
    folder = tmp_path_factory.mktemp("exported")
    run, source = open_trained(trained.scl), ShardSource.load(str(trained.data / "val"), "labels", None)
    thresholds, _ = best_thresholds(val_parts, source, 0.0)
    exported = export(run, str(folder / "model"), thresholds, source.index.url)
    assert export_onnx(exported) in (None, pytest.approx(0, abs=1e-5))
    return exported.folder


@pytest.mark.long
def test_the_command_scores_with_ray(model, trained, tmp_path):
    out = str(tmp_path / "model")
    assert main(["export", trained.scl, "--out", out, "--val", str(trained.data / "val"), "--workers", "1"]) == 0
    np.testing.assert_array_equal(Exported.load(out).thresholds, Exported.load(model).thresholds)


@pytest.fixture(scope="module")
def images(trained, tmp_path_factory) -> Path:
    """The test set's images as files, named by key."""
    folder = tmp_path_factory.mktemp("images")
    source = ShardSource.load(str(trained.data / "test"), "labels", None)
    for shard in range(len(source.index.shards)):
        opened = source.open(shard)
        for row, key in enumerate(opened.members.keys):
            (folder / f"{key}.{opened.members.extensions[row]}").write_bytes(opened.read(row))
    return folder


@pytest.fixture(scope="module")
def evaluated(trained) -> dict[str, dict[str, np.ndarray]]:
    """split → key → the scores that the trainer's own evaluation collects."""
    found: dict[str, dict[str, np.ndarray]] = {}
    run, world = open_trained(trained.scl), World(torch.device("cpu"))
    for split in ("val", "test"):
        source = ShardSource.load(str(trained.data / split), "labels", None)
        collected: list[np.ndarray] = []

        class Recorder(ScoreCollector):
            def add(self, scores, targets, keep=None, ordinals=None, collected=collected):
                collected.append(scores.numpy().copy())
                super().add(scores, targets, keep, ordinals)

        unwatched = SimpleNamespace(beat=lambda where: None)  # a watchdog needs peers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "ScoreCollector", Recorder)
            model = load_model(run, source, world.device)
            evaluation.evaluate(model, source, run.config, world, unwatched, split,
                                lambda source, plan: evaluation.eval_stream(source, plan, run.config, world))
        keys = [key for shard in range(len(source.index.shards)) for key in source.index.members(shard).keys]
        found[split] = dict(zip(keys, np.concatenate(collected), strict=True))
    return found


def predict(capsys, *arguments: str, code: int = 0) -> dict[str, dict]:
    assert main(["predict", *arguments, "--json"]) == code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {Path(line["image"]).stem: line for line in lines}


def f1(scores: np.ndarray, truth: np.ndarray, limit: float) -> float:
    hit = (scores >= limit) & truth
    return 2 * hit.sum() / ((scores >= limit).sum() + truth.sum())


def test_predictions_equal_the_evaluation(model, images, evaluated, capsys):
    found = predict(capsys, model, str(images), "--top", "10", "--batch", "7")
    assert found.keys() == evaluated["test"].keys()
    for key, line in found.items():
        scores = {entry["class"]: entry["probability"] for entry in line["top"]}
        np.testing.assert_allclose([scores[str(c)] for c in range(10)], evaluated["test"][key], atol=1e-5)


def test_thresholds_are_the_best_on_the_validation_set(model, val_parts, trained, evaluated, images, capsys):
    """No other score of any validation image gives a better F1; predictions are what reaches its threshold."""
    source = ShardSource.load(str(trained.data / "val"), "labels", None)
    truth = np.concatenate([source.sidecar.labels(s).dense(10) for s in range(len(source.index.shards))]) == 1
    # Thresholds are scores of their own pass: another one (other batches) has the same scores but for rounding.
    scores = np.concatenate([part["scores"] for _, part in val_parts.read_all(list(shard_rows(source)))])
    np.testing.assert_allclose(scores, np.stack(list(evaluated["val"].values())), atol=1e-6)
    exported = Exported.load(model)
    assert exported.classes == source.index.classes
    assert exported.thresholds is not None
    for c in range(10):
        best = max(f1(scores[:, c], truth[:, c], limit) for limit in scores[:, c])
        assert f1(scores[:, c], truth[:, c], exported.thresholds[c]) == best
    for key, line in predict(capsys, model, str(images)).items():
        limits = exported.thresholds
        expected = {str(c) for c in range(10) if evaluated["test"][key][c] >= limits[c]}
        near = {str(c) for c in range(10) if abs(evaluated["test"][key][c] - limits[c]) < 1e-5}
        assert {entry["class"] for entry in line["predicted"]} ^ expected <= near


def test_corrupt_samples_are_judged(trained, tmp_path):
    """As in training: a few are left out and said, more than data.max_bad_fraction are an error."""
    shutil.copytree(trained.data / "val", tmp_path / "val")
    source = ShardSource.load(str(tmp_path / "val"), "labels", None)
    blank_out(source.index, 0, 4)
    parts = scored(open_trained(trained.scl), source, tmp_path / "parts")
    with pytest.raises(UserError, match=r"1 of 60 samples of .* cannot be decoded.*max_bad_fraction"):
        best_thresholds(parts, source, 0.01)
    read = dict(parts.read_all(list(shard_rows(source))))
    assert read[0]["rows"].tolist() == [row for row in range(int(source.counts[0])) if row != 4]
    scores = np.concatenate([part["scores"] for part in read.values()])
    truth = np.concatenate([source.sidecar.labels(s).dense(10, part["rows"]) for s, part in read.items()]) == 1
    for c, limit in enumerate(best_thresholds(parts, source, 0.02)[0]):
        assert f1(scores[:, c], truth[:, c], limit) == max(f1(scores[:, c], truth[:, c], s) for s in scores[:, c])


def test_onnx_equals_the_evaluation(model, images, evaluated):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(model + "/model.onnx", providers=["CPUExecutionProvider"])
    exported = Exported.load(model)
    paths = sorted(images.iterdir())[:9]
    inputs = np.stack([exported.prepare(decode_image(path.read_bytes())).numpy() for path in paths])
    for count in (1, 9):
        found = session.run(["probabilities"], {"inputs": inputs[:count]})[0]
        np.testing.assert_allclose(found, [evaluated["test"][p.stem] for p in paths[:count]], atol=1e-4)


def test_feature_models_reach_onnx(tmp_path):
    """A linear layer on features: what ONNX computes is the matrix product."""
    architecture = {"model": {"backbone": "features"}, "image_size": 8, "normalize": "unit", "feature_width": 5}
    weights = empty_model(architecture, 3)
    from safetensors.torch import save_file

    save_file(weights.state_dict(), tmp_path / "model.safetensors")
    exported = Exported(str(tmp_path), ["a", "b", "c"], [], SIGMOID, None, None, {}, architecture,
                        file_digest(str(tmp_path / "model.safetensors")), {})
    exported.save()
    assert export_onnx(Exported.load(str(tmp_path))) in (None, pytest.approx(0, abs=1e-6))
    assert main(["predict", str(tmp_path), str(tmp_path)]) == 2


def test_calibrated_probabilities_travel_with_the_model(model, val_parts, trained, images, evaluated, tmp_path, capsys):
    """labels.json, predict and ONNX give the same curves; the thresholds judge scores, --threshold probabilities."""
    run, source = open_trained(trained.scl), ShardSource.load(str(trained.data / "val"), "labels", None)
    thresholds, calibration = best_thresholds(val_parts, source, 0.0)
    exported = export(run, str(tmp_path / "model"), thresholds, source.index.url, calibration)
    assert export_onnx(exported) in (None, pytest.approx(0, abs=1e-5))
    body = json.loads((tmp_path / "model" / "labels.json").read_text())
    curves = np.array([[entry["slope"], entry["offset"]] for entry in body["classes"]])
    assert (curves[:, 0] > 0).all()
    scores = np.stack(list(evaluated["test"].values())).astype(np.float64)
    expected = 1 / (1 + np.exp(-(curves[:, 0] * np.log(scores / (1 - scores)) + curves[:, 1])))
    plain, found = (predict(capsys, folder, str(images), "--top", "10") for folder in (model, exported.folder))
    for i, key in enumerate(evaluated["test"]):
        assert (plain[key]["calibrated"], found[key]["calibrated"]) == (False, True)
        given = {entry["class"]: entry["probability"] for entry in found[key]["top"]}
        np.testing.assert_allclose([given[str(c)] for c in range(10)], expected[i], atol=1e-4)
        assert {e["class"] for e in found[key]["predicted"]} == {e["class"] for e in plain[key]["predicted"]}
    for line in predict(capsys, exported.folder, str(images), "--top", "10", "--threshold", "0.4").values():
        assert line["predicted"] == [entry for entry in line["top"] if entry["probability"] >= 0.4]
    assert main(["predict", model, str(sorted(images.iterdir())[0])]) == 0
    assert "uncalibrated: scores rank images" in capsys.readouterr().err
    assert "uncalibrated" in json.loads(Path(model, "labels.json").read_text())["calibration"]
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(exported.folder + "/model.onnx", providers=["CPUExecutionProvider"])
    paths = [path for path in images.iterdir() if path.stem == next(iter(evaluated["test"]))]
    inputs = np.stack([exported.prepare(decode_image(path.read_bytes())).numpy() for path in paths])
    np.testing.assert_allclose(session.run(["calibrated"], {"inputs": inputs})[0], expected[:1], atol=1e-3)


def test_heatmaps_and_bad_images(model, images, tmp_path, capsys):
    """A broken file is named and changes the exit code, the others are done; the picture has a line an image."""
    chosen = sorted(images.iterdir())[:3]
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(chosen[0].read_bytes()[:200])
    out = tmp_path / "maps.png"
    command = ["predict", model, *map(str, chosen), str(broken), "--heatmaps", str(out)]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert "broken.jpg" in printed.err
    with Image.open(out) as picture:
        assert picture.size == (5 * 152, 3 * 180)
    assert main(["predict", model, str(tmp_path / "none.jpg")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["predict", model, str(tmp_path / "empty")]) == 2
    assert "no image below" in capsys.readouterr().err


def test_mistakes(model, trained, tmp_path, capsys):
    assert main(["export", trained.scl, "--out", model, "--no-onnx"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), "x.jpg"]) == 2
    assert "lacuna export" in capsys.readouterr().err
    (tmp_path / "t.json").write_text(json.dumps({"classes": [
        {"id": None, "name": str(c), "threshold": None if c == 3 else c / 10} for c in range(10)]}))
    command = ["export", trained.scl, "--out", str(tmp_path / "given"), "--no-onnx", "--thresholds"]
    assert main([*command, str(tmp_path / "t.json"), "--val", "x"]) == 2
    assert main([*command, str(tmp_path / "t.json")]) == 0
    np.testing.assert_array_equal(Exported.load(str(tmp_path / "given")).thresholds,
                                  [np.inf if c == 3 else c / 10 for c in range(10)])
    capsys.readouterr()
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="damaged"):
        Exported.load(str(copy)).model()
    assert main(["export", trained.scl, "--out", str(copy), "--overwrite", "--no-onnx", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["thresholds"] is None
    assert not (copy / "model.onnx").exists(), "that of the old weights is gone"
    assert torch.equal(Exported.load(str(copy)).model().head.bias, Exported.load(model).model().head.bias)
