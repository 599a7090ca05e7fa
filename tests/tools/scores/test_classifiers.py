"""Proves that classifiers with classes of their own are added up to ours as the mapping says, and proposals of one."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from sklearn.metrics import average_precision_score

from lacuna import state_store
from lacuna.basics.places import CONFIGS
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.wordnet import WordNet
from lacuna.tools.bench.quality.data import prepare
from lacuna.tools.bench.quality.lite0 import lite0_weights
from lacuna.tools.cli import main
from lacuna.tools.passes.scoring import ScoreJob
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.scores.classifiers import ClassifierModel
from lacuna.tools.scores.job import OutsideJob, OwnModel
from lacuna.tools.scores.looking import Views
from lacuna.tools.scores.mapping import Outputs, read_mapping
from tests.helpers.labelled_shards import write_dataset
from tests.helpers.small_wordnet import WNID, write_wordnet

TINY = "test_efficientnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("weights") / "tiny.safetensors")
    model = timm.create_model(TINY)
    with torch.no_grad():
        model.classifier.weight.mul_(3000)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_scores_by_a_mapping(weights, digit_shards, tmp_path, activation):
    """Ids, names and numbers; one class without a counterpart."""
    source = ShardSource.load(str(digit_shards / "test"), "labels", None)
    (tmp_path / "map.tsv").write_text("# digits\n0\tn01440764; goldfish\n1\t#7\n2\t\n3\tgreat white shark; #1; #1\n")
    model = ClassifierModel("timm", TINY, weights, size=48, activation=activation, temperature=2.0)
    mapping = read_mapping(str(tmp_path / "map.tsv"), source.index, Outputs(model.classes(), None))
    assert mapping[:4] == ((0, 1), (7,), (), (1, 2))
    mapped = ClassifierModel("timm", TINY, weights, size=48, activation=activation, temperature=2.0, mapping=mapping)
    job = OutsideJob(mapped, source, Views())
    found = job.build()(0)["scores"]
    net = timm.create_model(TINY, checkpoint_path=weights).eval()
    opened = source.open(0)
    with torch.no_grad():
        for row in range(len(opened.members.keys)):
            image = decode_image(opened.read(row))[None]
            mode = net.pretrained_cfg["interpolation"]
            small = torch.nn.functional.interpolate(image, (48, 48), mode=mode, antialias=True)[0].float() / 255
            mean, std = (torch.tensor(net.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
            logits = net(((small - mean) / std)[None])[0].double().numpy() / 2
            p = 1 / (1 + np.exp(-logits)) if activation == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
            add = max if activation == "sigmoid" else sum
            expected = [add(p[[0, 1]]), p[7], 0, add(p[[1, 2]]), *[0] * 6]
            np.testing.assert_allclose(found[row], expected, atol=1e-5)
    assert np.ptp(found[:, 0]) > 1e-3
    rows = net.classifier.weight.detach().double().numpy()
    rows = rows - rows.mean(0)
    vectors = mapped.class_vectors()
    for number, own in ((0, [0, 1]), (1, [7]), (3, [1, 2])):
        expected = rows[own].mean(0)
        np.testing.assert_allclose(vectors[number], expected / np.linalg.norm(expected), atol=1e-5)
    assert not vectors[[2, 4, 5, 6, 7, 8, 9]].any()


@pytest.fixture
def animals(tmp_path) -> tuple[str, str, str]:
    """(shards, WordNet, the model's classes) of names of which some have several meanings."""
    write_dataset(str(tmp_path / "data"), np.zeros((2, 5), np.int8), [2],
                  classes=["dog", "mouse", "kite", "unicorn", "street dogs"])
    lines = [WNID.format(12) + "\tcorgi", WNID.format(13) + "\thusky", WNID.format(21) + "\tmouse, computer mouse",
             WNID.format(23) + "\ttraffic light"] + [f"other {n}" for n in range(996)]
    (tmp_path / "outputs.txt").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "data"), write_wordnet(tmp_path / "wordnet"), str(tmp_path / "outputs.txt")


def test_a_proposal_by_wordnet(weights, animals, tmp_path, capsys):
    shards, wordnet, outputs = animals
    path = tmp_path / "map.tsv"
    argv = ["scores", f"timm:{TINY}", "--weights", weights, "--shards", shards, "--model-classes", outputs,
            "--suggest-mapping", str(path)]
    assert main([*argv, "--wordnet", wordnet, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["without_counterpart"] == ["kite", "unicorn"]
    text = path.read_text()
    assert f"dog\t{WNID.format(12)}; {WNID.format(13)}\n" in text
    assert f"mouse\t{WNID.format(21)}\n" in text  # the model knows no rodent
    assert f"street dogs\t{WNID.format(12)}; {WNID.format(13)}\n" in text
    assert "# street dogs (by its last word): " in text
    assert main(argv) == 2
    assert "--suggest-mapping needs WordNet: --wordnet DIR" in capsys.readouterr().err

    index = ShardSource.load(shards, "labels", None).index
    model = ClassifierModel("timm", TINY, weights)
    plain, with_kinds = Outputs(model.classes(outputs), None), Outputs(model.classes(outputs), WordNet.load(wordnet))
    assert read_mapping(str(path), index, plain) == ((0, 1), (2,), (), (), (0, 1))
    path.write_text(f"dog\t{WNID.format(11)}\n")
    assert read_mapping(str(path), index, with_kinds)[0] == (0, 1)


@pytest.mark.parametrize(("text", "message"), [
    ("cat\tn00000012\n", "line 1: 'cat' is no `class<TAB>theirs"), ("dog n1\n", "line 1: 'dog n1' is no"),
    ("dog\tgriffin\n", "line 1: the model has no class 'griffin'"), ("dog\t#4711\n", "has no class '#4711'"),
    (f"dog\t{WNID.format(11)}\n", "itself; with --wordnet DIR its kinds count too"),
    ("dog\tcorgi\ndog\thusky\n", "line 2: 'dog' is there twice"), ("dog\t\n", "none of the dataset's classes has a"),
    (None, "--mapping .*: no such file")])
def test_mistakes_in_mappings(weights, animals, tmp_path, text, message, capsys):
    shards, _, outputs = animals
    if text is not None:
        (tmp_path / "map.tsv").write_text(text)
    argv = ["scores", f"timm:{TINY}", "--weights", weights, "--shards", shards, "--out", str(tmp_path / "out"),
            "--model-classes", outputs, "--mapping", str(tmp_path / "map.tsv")]
    assert main(argv) == 2
    assert re.search(message, capsys.readouterr().err)


def test_mistakes_in_models(weights, animals, tmp_path, capsys):
    shards, _, _ = animals
    few = tmp_path / "few.txt"
    few.write_text("a\nb\n")
    (tmp_path / "bad.safetensors").write_bytes(b"no tensors")
    wanted = {("timm:no_such_net", "--weights", weights): "timm:no_such_net with --weights",
              ("torchvision:no_such_net", "--weights", weights): "torchvision:no_such_net with --weights",
              (f"timm:{TINY}", "--weights", str(tmp_path / "bad.safetensors")): "not a file of plain tensors",
              (f"timm:{TINY}", "--weights", weights): "its classes are not WordNet ids, so say which",
              (f"timm:{TINY}", "--weights", weights, "--model-classes", str(few)): "1000 outputs, .*names 2",
              ("timm:resnet18", "--weights", weights): "lacks 102 of 122 tensors"}
    for options, message in wanted.items():
        assert main(["scores", *options, "--shards", shards, "--out", str(tmp_path / "out")]) == 2
        assert re.search(message, capsys.readouterr().err), options


SHIPPED = {"imagenet_coco": (80, 63), "imagenet_voc": (20, 20), "imagenet_openimages": (601, 390)}


@pytest.mark.parametrize("name", SHIPPED)
def test_mappings_that_ship(weights, tmp_path, name):
    with open(f"{CONFIGS}/mappings/{name}.tsv", encoding="utf-8") as lines:
        body = [line.split("\t") for line in lines if not line.startswith("#")]
    classes = [line[0] for line in body]
    assert len(classes) == SHIPPED[name][0]
    index = write_dataset(str(tmp_path / "data"), np.zeros((1, len(classes)), np.int8), [1], classes=classes).index
    outputs = Outputs(ClassifierModel("timm", TINY, weights).classes(), None)
    mapping = read_mapping(name, index, outputs)
    assert sum(bool(own) for own in mapping) == SHIPPED[name][1]
    assert len(mapping[[cls.lower() for cls in classes].index("dog")]) == 118


def test_crops_of_one_of_our_runs(trained):
    """The whole image scores as every other command scores it."""
    run, source = open_trained(trained.full), ShardSource.load(str(trained.data / "test"), "labels", None)
    found = OutsideJob(OwnModel(run, source), source, Views(grid=2)).build()(0)
    np.testing.assert_allclose(found["global"], ScoreJob(run, source).build()(0)["scores"], atol=1e-6)
    assert (found["crop_min"] <= found["crop_max"]).all()
    assert (found["crop_min"] < found["crop_max"]).any()


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("LACUNA_EVAL_DATA"), reason="real photos: set LACUNA_EVAL_DATA")
def test_imagenet_knows_most_of_coco(tmp_path):
    """EfficientNet-lite0 on real photos, without any label of theirs."""
    weights = lite0_weights(str(tmp_path))
    data = prepare(os.path.join(os.environ["LACUNA_EVAL_DATA"], "coco_photos"), str(tmp_path), 0.15)
    out = str(tmp_path / "table")
    assert main(["scores", "timm:tf_efficientnet_lite0", "--weights", weights, "--mapping", "imagenet_coco",
                 "--image-size", "160", "--shards", f"{data}/test", "--out", out, "--dtype", "float32"]) == 0
    source, store = ShardSource.load(f"{data}/test", "labels", None), state_store.open(out)
    reader, shards = store.reader(store.snapshots()[-1].name), range(len(source.index.shards))
    scores = np.concatenate([reader.read_shard("scores", shard) for shard in shards])
    truth = np.concatenate([source.sidecar.labels(shard).dense(80) for shard in shards]) == POSITIVE
    mapped = np.flatnonzero(scores.any(0))
    assert len(mapped) == 63
    precision = np.mean([average_precision_score(truth[:, c], scores[:, c]) for c in mapped if truth[:, c].any()])
    assert precision > 0.38
    best = np.argsort(-scores, axis=None)[:300]
    assert truth.reshape(-1)[best].mean() > 0.75
