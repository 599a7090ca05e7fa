"""Proves that the real packages read our files: Hugging Face's load_dataset and pycocotools, in a venv of their own."""

from __future__ import annotations

import json

import pytest

from lacuna.data_pipelines.index import ShardIndex, Sidecar
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
