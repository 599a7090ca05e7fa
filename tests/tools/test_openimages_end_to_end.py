"""Proves the whole way: OpenImages' CSVs → shards → Ignore on 2 ranks → Ray prior → Selective → mAP(C) and mAP(O)."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.readers import digits
from lacuna.tools.cli import main
from lacuna.tools.passes.pool import PoolSettings, ray_room
from lacuna.trainer.config.files import load_config
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Task
from lacuna.trainer.priors import read_prior
from tests.helpers.launching import environment, last_checkpoint

MIDS = [f"/m/0{d}" for d in range(10)]
GHOST, OTHER = "/m/ghost", "/t/other"  # trainable but never annotated; annotated but not trainable


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Digit scenes in the files that OpenImages V6 is published as, with their quirks."""
    folder = tmp_path_factory.mktemp("openimages")
    described = [*((mid, f"Digit {d}") for d, mid in enumerate(MIDS)), (GHOST, '"Ghost, ""white"""'), (OTHER, "x")]
    (folder / "descriptions.csv").write_text("LabelName,DisplayName\n" + "".join(f"{m},{n}\n" for m, n in described))
    (folder / "trainable.txt").write_text("".join(f"{mid}\n" for mid in [*MIDS, GHOST]))
    for number, (split, count) in enumerate((("train", 240), ("val", 50), ("test", 60))):
        scenes = digits.read(count, split)
        rng = np.random.RandomState(number)
        rows, listed = [], []
        (folder / split).mkdir()
        for i, sample in enumerate(scenes.samples):
            name = f"{int(rng.randint(1, 2**31)):016x}"
            picture = Image.open(io.BytesIO(sample.source.read()))
            turned = i % 7 == 0  # the file lies on its side, the list says by how much to turn it back
            if turned:
                picture = picture.transpose(Image.Transpose.ROTATE_270)
            if i % 20 != 3:  # the others were deleted by their owners: labels without an image
                picture.save(folder / split / f"{name}.jpg", quality=95)
            listed.append(f'{name},{split},http://x/{name},"a, ""title""",{90.0 if turned else ("", "0.0")[i % 2]}')
            rows += _label_rows(rng, name, scenes.labels.positives(i).tolist())
        rng.shuffle(rows)
        (folder / f"{split}-labels.csv").write_text("ImageID,Source,LabelName,Confidence\n" + "".join(rows))
        listed = ["ImageID,Subset,OriginalURL,Title,Rotation", *listed]
        (folder / f"{split}-images.csv").write_text("".join(f"{line}\n" for line in listed))
    return folder


def _label_rows(rng: np.random.RandomState, image: str, present: list[int]) -> list[str]:
    absent = [d for d in range(10) if d not in present]
    kept = [d for d in present if rng.rand() < 0.7] or present[:1]
    rows = [(f"{('verification', 'crowdsource-verification')[rng.randint(2)]}", MIDS[d], 1) for d in kept]
    rows += [("verification", MIDS[d], 0) for d in rng.choice(absent, 3, replace=False)]
    rows += [("machine", MIDS[rng.randint(10)], round(rng.uniform(0.5, 1), 1)), ("verification", OTHER, 1)]
    if rng.rand() < 0.1:  # humans who disagree
        rows += [("crowdsource-verification", MIDS[kept[0]], 0)]
    return [f"{image},{source},{mid},{value}\n" for source, mid, value in rows]


@pytest.mark.long
def test_openimages(world, tmp_path, capsys, monkeypatch):
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    for split in ("train", "val", "test"):
        assert main(["shards", "make", "openimages", "--labels", str(world / f"{split}-labels.csv"), "--classes",
                     str(world / "descriptions.csv"), "--class-list", str(world / "trainable.txt"), "--images",
                     str(world / split), "--images-csv", str(world / f"{split}-images.csv"), "--split", split, "--out",
                     str(tmp_path / split), "--streams", "2", "--rows-per-shard", "40", "--workers", "1"]) == 0
    index = ShardIndex.load(str(tmp_path / "train"))
    assert (index.class_ids, index.classes[-1]) == ([*MIDS, GHOST], 'Ghost, "white"')
    assert (index.samples, index.source["images_missing"]) == (228, 12)
    assert min(index.source[k] for k in ("rows_of_machines_left_out", "rows_of_other_classes",
                                         "contradictions_left_unknown")) > 0
    config = tmp_path / "csl.yaml"
    config.write_text(json.dumps({  # JSON is YAML
        "name": "oi", "run_folder": str(tmp_path / "runs"),
        "data": {**{split: {"url": str(tmp_path / split)} for split in ("train", "val", "test")}, "image_size": 32,
                 "normalize": "centered", "streams": 2, "augment": {"flip": False}},
        "model": {"backbone": "lacuna:tiny", "bottleneck": 16},
        "method": {"name": "csl", "mode": "selective", "gamma_positive": 1, "gamma_negative": 2, "gamma_unknown": 4,
                   "top": 1, "prior_threshold": 0.3},
        "phases": [{"name": "train", "epochs": 4, "batch": 16, "lr": 2e-3, "schedule": "one_cycle", "warmup": "20%"}],
    }))
    capsys.readouterr()
    with ray_room(PoolSettings(workers=2)):
        command = ["csl", str(config), "--ranks", "2", "--json"]
        assert main(command) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert main(command) == 0  # everything is there: nothing is trained or scored again
        again, words = capsys.readouterr()
        assert json.loads(again) == found
        assert words.count("is finished") == 3
        assert main(["eval", found["selective_run"], "--shards", str(tmp_path / "test"), "--protocol", "openimages",
                     "--val", str(tmp_path / "val"), "--json"]) == 0
        measured = json.loads(capsys.readouterr().out)
    _check_prior(found, index)
    # The loop's own test batches differently; a class without annotations is no class.
    assert measured["map_c_classes"] == 10
    assert measured["map_c"] == pytest.approx(found["selective"]["test"]["map_csl_c"], abs=0.05)
    assert measured["map_o"] == pytest.approx(found["selective"]["test"]["map_csl_o"], abs=0.05)
    assert measured["mf1_skip_empty_classes"] == 10
    positives, negatives = (getattr(Sidecar.load(ShardIndex.load(str(tmp_path / "test")), "labels"), n).sum()
                            for n in ("positives", "negatives"))
    assert measured["map_c"] > 100 * positives / (positives + negatives) + 5  # it has learnt something


def _check_prior(found: dict, index: ShardIndex) -> None:
    """The file names classes by MID, and the second training began with it."""
    body = json.loads(Path(found["prior"]).read_text())
    assert body["classes"] == [*MIDS, GHOST]
    assert body["samples"] == index.samples
    assert body["naive_prior"][-1] == 0
    prior = read_prior(found["prior"], 11, index.classes, index.class_ids)
    assert ((prior > 0) & (prior < 1)).all()
    used = load_file(last_checkpoint(Path(found["selective_run"])) / "method.safetensors")["prior"]
    assert used.numpy() == pytest.approx(prior, abs=1e-7)
    first, second = (load_config(str(Path(found[run]) / "config.yaml"), []) for run in ("ignore_run", "selective_run"))
    assert (first.method["mode"], second.method["mode"]) == ("ignore", "selective")
    gammas = [[config.method[f"gamma_{kind}"] for kind in ("positive", "negative", "unknown")]
              for config in (first, second)]
    assert gammas == [[0, 0, 0], [1, 2, 4]]  # the prior is made of probabilities
    with pytest.raises(ValueError, match="is not a class of the data"):
        build_method(second.method, Task(11, 10, np.ones(11), np.ones(11), False,
                                         class_names=tuple("abcdefghijk"), class_ids=()))


def test_csl_is_for_csl(tmp_path, capsys):
    root = Path(__file__).resolve().parents[2]
    assert main(["csl", str(root / "configs" / "demo.yaml")]) == 2
    assert "method.name is 'gr'" in capsys.readouterr().err
