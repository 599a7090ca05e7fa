"""Proves that the real packages read our files, and we what they write: Hugging Face's datasets, pycocotools, Label
Studio's SDK and FiftyOne's importer, in a venv of their own."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import UNKNOWN
from lacuna.tools.cli import main
from lacuna.tools.exchange import read_format
from tests.helpers.annotation_tools import outside

LOAD = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
from datasets import load_dataset
data = load_dataset(sys.argv[1], split="train", cache_dir=sys.argv[2])
names = data.features["positives"].feature.names
print(json.dumps({"names": names, "sizes": sorted({row["image"].size for row in data}),
                  "rows": {row["key"]: [names[i] for i in row["positives"]] for row in data}}))
"""
OTHERS = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
from datasets import ClassLabel, Dataset, Features, Image, Sequence
from PIL import Image as Pictures
os.makedirs(sys.argv[1] + "/data")
for name in ("a", "b"):
    Pictures.new("RGB", (8, 8)).save(f"{sys.argv[1]}/{name}.png")
paths = [f"{sys.argv[1]}/{name}.png" for name in ("a", "b")]
features = Features({"image": Image(), "labels": Sequence(ClassLabel(names=["cat", "dog"]))})
data = Dataset.from_dict({"image": paths, "labels": [[1], [0, 1]]}, features=features)
data.to_parquet(sys.argv[1] + "/data/train-00000-of-00001.parquet")
print("{}")
"""
COUNT = """
import json, sys
from pycocotools.coco import COCO
coco = COCO(sys.argv[1] + "/annotations.json")
found = coco.loadRes(sys.argv[1] + "/results.json") if json.load(open(sys.argv[1] + "/results.json")) else None
names = {c["id"]: c["name"] for c in coco.loadCats(coco.getCatIds())}
rows = {coco.imgs[i]["file_name"]: sorted(names[a["category_id"]] for a in coco.loadAnns(coco.getAnnIds(imgIds=[i])))
        for i in coco.getImgIds()}
print()
print(json.dumps({"rows": rows}))
"""
STUDIO = """
import json, sys
from label_studio_sdk.label_interface import LabelInterface
from label_studio_sdk.converter import Converter
setup = open(sys.argv[1] + "/setup.xml").read()
project, tasks = LabelInterface(setup), json.load(open(sys.argv[1] + "/tasks.json"))
project.validate()
checked = {"tasks": all(project.validate_task({"data": task["data"]}) for task in tasks),
           "annotations": [project.validate_annotation(a) for t in tasks for a in t.get("annotations", [])],
           "predictions": [project.validate_prediction(p) for t in tasks for p in t.get("predictions", [])]}
Converter(setup, sys.argv[1]).convert_to_json_min(sys.argv[1] + "/tasks.json", sys.argv[1] + "/simple", is_dir=False)
simple = json.load(open(sys.argv[1] + "/simple/result.json"))
named = lambda found: found["choices"] if isinstance(found, dict) else [found]
print(json.dumps({**checked, "rows": {row["key"]: named(row["present"]) for row in simple if row.get("present")}}))
"""
# Its database is not started: where that does not run, the importer still does.
VOXEL = """
import json, os, sys
os.environ["FIFTYONE_DISABLE_SERVICES"] = "1"
from fiftyone.utils.data.importers import LegacyFiftyOneDatasetImporter
names = lambda found: [(one.label, one.confidence) for one in found.classifications]
rows = {}
with LegacyFiftyOneDatasetImporter(sys.argv[1]) as samples:
    for sample in samples:
        assert os.path.exists(sample.filepath), sample.filepath
        key = os.path.splitext(os.path.relpath(sample.filepath, sys.argv[1] + "/data"))[0]
        rows[key] = [names(sample.ground_truth), names(sample.absent), names(sample.predictions)]
print(json.dumps(rows))
"""


def positives(url: str) -> dict[str, list[str]]:
    index = ShardIndex.load(url)
    sidecar = Sidecar.load(index, "labels")
    return {key: [index.classes[c] for c in sidecar.labels(shard).positives(row)] for shard in range(len(index.shards))
            for row, key in enumerate(index.members(shard).keys)}


@pytest.mark.long
def test_hugging_face_opens_it(digit_shards, tmp_path):
    url, out = str(digit_shards / "val"), str(tmp_path / "hf")
    assert main(["exchange", "write", "hugging_face", url, "--images", "--out", out]) == 0
    found = outside(LOAD, out, str(tmp_path / "cache"))
    assert found["rows"] == positives(url)
    assert found["names"] == ShardIndex.load(url).classes
    assert found["sizes"] == [[32, 32]]


@pytest.mark.long
def test_a_dataset_of_hugging_face_is_read(tmp_path):
    folder = tmp_path / "theirs"
    outside(OTHERS, str(folder))
    found = read_format("hugging_face", str(folder))
    assert found.classes == ["cat", "dog"]
    assert {key.rpartition("/")[2]: marks.positives for key, marks in found.samples.items()} == {
        "a": ["dog"], "b": ["cat", "dog"]}


@pytest.mark.long
def test_pycocotools_opens_it(digit_shards, tmp_path):
    url, out = str(digit_shards / "val"), tmp_path / "coco"
    assert main(["exchange", "write", "coco", url, "--out", str(out)]) == 0
    results = [{"image_id": 1, "category_id": 2, "bbox": [0, 0, 1, 1], "score": 0.5}]
    (out / "results.json").write_text(json.dumps(results))
    found = outside(COUNT, str(out))["rows"]
    assert {name.rpartition(".")[0]: names for name, names in found.items()} == {
        key: sorted(names) for key, names in positives(url).items()}


def with_suggestions(shards, tmp_path, form: str) -> str:
    """A written folder, with images, labels of `single` and a suggestion for the first samples."""
    index = ShardIndex.load(str(shards))
    known = Sidecar.load(index, "single").labels(0).dense(10)
    rows = [(0, row, int(np.flatnonzero(known[row] == UNKNOWN)[0]), 0.25 + row / 8) for row in range(4)]
    with open(tmp_path / "s.csv", "w", newline="") as f:
        csv.writer(f).writerows([("shard", "row", "class", "score"), *rows])
    out = str(tmp_path / form)
    assert main(["exchange", "write", form, str(shards), "--labels", "single", "--images", "--suggestions",
                 str(tmp_path / "s.csv"), "--out", out]) == 0
    return out


@pytest.mark.long
def test_label_studio_takes_the_tasks(single_shards, tmp_path):
    """Setup, tasks, annotations and predictions are valid to its SDK, and its converter finds the same labels."""
    out = with_suggestions(single_shards / "train", tmp_path, "label_studio")
    found = outside(STUDIO, out)
    samples = read_format("label_studio", out).samples
    assert found["tasks"]
    assert found["annotations"] == [True] * sum(bool(marks.positives) for marks in samples.values())
    assert found["predictions"] == [True] * 4
    assert found["rows"] == {key: marks.positives for key, marks in samples.items() if marks.positives}


@pytest.mark.long
def test_fiftyone_imports_the_folder(single_shards, tmp_path):
    out = with_suggestions(single_shards / "train", tmp_path, "fiftyone")
    wanted = read_format("fiftyone", out).samples
    assert outside(VOXEL, out) == {key: [[[name, None] for name in marks.positives],
                                         [[name, None] for name in marks.negatives],
                                         [[name, score] for name, score in marks.suggested.items()]]
                                   for key, marks in wanted.items()}
    assert sum(len(marks.suggested) for marks in wanted.values()) == 4
