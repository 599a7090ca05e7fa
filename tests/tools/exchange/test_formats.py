"""Proves that every format gives back exactly what was written, reads what other tools write, and refuses the rest."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.tools.cli import main
from lacuna.tools.exchange import FORMATS, read_format, write_format
from lacuna.tools.exchange.bundle import Bundle, Marks
from lacuna.tools.exchange.label_studio import PREFIX
from lacuna.tools.explore.decisions import Decisions
from tests.helpers.answering import decisions as decisions_of

NAMES = ["cat", "Ähre", "traffic light", 'a "quoted", name', "x/y\\z", "<b>&amp;</b>", "..", "猫", "1", "-1"]


def random_bundle(seed: int) -> Bundle:
    rng = random.Random(seed)
    samples = {}
    for key in ("plain", "a/b/c", "with space", "images/data/x", "ünï", "0", "empty"):
        marks = Marks()
        for name in NAMES if key != "empty" else ():
            kind = rng.choice("pns--")
            if kind == "p":
                marks.positives.append(name)
            elif kind == "n":
                marks.negatives.append(name)
            elif kind == "s":
                marks.suggested[name] = rng.random()
        samples[key] = marks
    return Bundle(NAMES, samples, {key: key + rng.choice([".jpg", ".png"]) for key in samples},
                  rng.choice(["unknown", "negative"]))


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_there_and_back_is_the_same(form, tmp_path):
    for seed in range(5):
        wanted = random_bundle(seed)
        out = str(tmp_path / str(seed))
        write_format(form, wanted, out, None, PREFIX)
        found = read_format(form, out)
        assert (found.classes, found.samples, found.unlisted) == (wanted.classes, wanted.samples, wanted.unlisted)


@pytest.fixture(scope="module")
def shards(single_shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange") / "train"
    shutil.copytree(single_shards / "train", folder)
    return folder


def call(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert main(["exchange", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_sidecar_comes_back_bit_for_bit(form, shards, tmp_path, capsys):
    """Partial and full labels of real shards, with images and suggestions: the same label files, by their hashes."""
    index = ShardIndex.load(str(shards))
    table = tmp_path / "s.csv"
    known = Sidecar.load(index, "single").labels(1).dense(10)
    rows = [(1, r, c, 0.125 * (c + 1) / 3) for r in range(4) for c in range(10) if known[r, c] == UNKNOWN]
    with open(table, "w", newline="") as f:
        csv.writer(f).writerows([("shard", "row", "class", "score"), *rows])
    for name in ("single", "labels"):
        images = ["--images"] if name == "single" else []
        out = str(tmp_path / name)
        written = call(capsys, "write", form, str(shards), "--labels", name, "--suggestions", str(table), "--out", out,
                       *images)
        assert written["samples"] == index.samples
        back = tmp_path / f"{name}.csv"
        read = call(capsys, "read", form, out, "--shards", str(shards), "--sidecar", f"{form}-{name}",
                    "--suggestions", str(back))
        assert (read["positives"], read["not_in_the_shards"]) == (written["positives"], 0)
        made, base = Sidecar.load(index, f"{form}-{name}"), Sidecar.load(index, name)
        assert (made.hashes, made.unlisted) == (base.hashes, base.unlisted)
        found = [(int(r["shard"]), int(r["row"]), int(r["class"]), float(r["score"]))
                 for r in csv.DictReader(open(back))]  # noqa: SIM115
        full = base.labels(1).dense(10)
        assert found == [row for row in rows if full[row[1], row[2]] != POSITIVE]
    key, member = index.members(0).keys[0], index.members(0)
    if form == "hugging_face":
        first = pq.read_table(min((tmp_path / "single" / "data").iterdir())).to_pylist()[0]
        assert Image.open(io.BytesIO(first["image"]["bytes"])).size == (32, 32)
        assert first["key"] == key
    else:
        folder = {"fiftyone": "data", "voc": "JPEGImages"}.get(form, "images")
        copied = tmp_path / "single" / folder / f"{key}.{member.extensions[0]}"
        assert copied.stat().st_size == member.sizes[0]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_only_what_is_asked(form, shards, tmp_path, capsys):
    """Of a table of questions: its samples alone, with their images, and read back they are the same."""
    keys = ShardIndex.load(str(shards)).members(1).keys
    with open(tmp_path / "q.csv", "w", newline="") as f:
        csv.writer(f).writerows([("shard", "row", "class", "score"), (1, 5, 2, 0.5), (1, 0, 1, 0.25), (1, 5, 1, 0.125)])
    out = tmp_path / "out"
    written = call(capsys, "write", form, str(shards), "--labels", "single", "--suggestions", str(tmp_path / "q.csv"),
                   "--only-suggested", "--images", "--out", str(out))
    assert written["samples"] == 2
    assert set(read_format(form, str(out)).samples) == {keys[5], keys[0]}
    copies = [path for folder in ("images", "data", "JPEGImages") for path in (out / folder).glob("*")
              if path.suffix != ".parquet"]
    assert {path.stem for path in copies} == (set() if form == "hugging_face" else {keys[5], keys[0]})


def test_decisions_go_out_and_come_back(shards, tmp_path, capsys):
    """What explore decided is in the files; what Label Studio's people changed is decided in explore."""
    run = tmp_path / "run"
    (run / "explore").mkdir(parents=True)
    made = decisions_of(str(run), shards, "single")
    index = ShardIndex.load(str(shards))
    known = Sidecar.load(index, "single").labels(0).dense(10)
    yes, no = (int(c) for c in np.flatnonzero(known[0] == UNKNOWN)[:2])
    made.decide((0, 0, yes), "accept", "ann")
    made.decide((0, 0, no), "reject", "ann")
    out = str(tmp_path / "ls")
    call(capsys, "write", "label_studio", str(shards), "--labels", "single", "--decisions", str(run), "--out", out)
    tasks = json.loads((tmp_path / "ls" / "tasks.json").read_text())
    task = next(t for t in tasks if t["data"]["key"] == index.members(0).keys[0])
    absent = next(r for r in task["annotations"][0]["result"] if r["from_name"] == "absent")
    assert absent["value"]["choices"] == [index.classes[no]]
    # A person looks at it: takes one away, cancels a second try.
    task["annotations"].append({"result": [absent], "was_cancelled": False})
    task["annotations"].append({"result": [], "was_cancelled": True})
    (tmp_path / "ls" / "tasks.json").write_text(json.dumps(tasks))
    other = tmp_path / "other"
    facts = call(capsys, "read", "label_studio", out, "--shards", str(shards), "--sidecar", "from-ls",
                 "--base", "single", "--decisions", str(other))
    assert facts["decided"] == 1
    again = Decisions(str(other / "explore" / "decisions-single.jsonl"), Sidecar.load(index, "single"))
    assert again.made == {(0, 0, no): "reject"}
    expected = known.copy()
    expected[0, no] = NEGATIVE
    np.testing.assert_array_equal(Sidecar.load(index, "from-ls").labels(0).dense(10), expected)


def test_beliefs_of_a_run(trained, tmp_path, capsys):
    """Exactly the unknown entries whose running score reaches the limit, by a plain loop over the store."""
    url, out = str(trained.data / "train"), str(tmp_path / "csv")
    store, index = state_store.open(trained.scl + "/state"), ShardIndex.load(url)
    reader = store.reader(store.snapshots()[-1].name)
    beliefs = {}
    for shard in range(len(index.shards)):
        known, keys = Sidecar.load(index, "single").labels(shard).dense(10), index.members(shard).keys
        scores = reader.read_shard("score", shard) / np.float32(255)
        beliefs |= {(keys[r], index.classes[c]): float(scores[r, c]) for r, c in np.argwhere(known == UNKNOWN).tolist()}
    limit = max(beliefs.values()) / 2
    call(capsys, "write", "csv", url, "--labels", "single", "--beliefs", trained.scl, "--at-least", repr(limit),
         "--out", out)
    found = {(row["key"], row["name"]) for row in csv.DictReader(open(f"{out}/labels.csv")) if row["score"]}  # noqa: SIM115
    assert found == {entry for entry, belief in beliefs.items() if belief >= limit}
    assert found


def test_files_of_others(tmp_path):
    """COCO with objects and no negatives, results with several boxes of a class, FiftyOne's single classification."""
    (tmp_path / "annotations.json").write_text(json.dumps({
        "images": [{"id": 7, "file_name": "val/a.jpg"}],
        "categories": [{"id": 3, "name": "cat"}, {"id": 1, "name": "dog"}],
        "annotations": [{"image_id": 7, "category_id": 3}, {"image_id": 7, "category_id": 3}]}))
    boxes = [{"image_id": 7, "category_id": 1, "score": score} for score in (0.2, 0.4)]
    (tmp_path / "results.json").write_text(json.dumps(boxes))
    found = read_format("coco", str(tmp_path))
    assert found == Bundle(["dog", "cat"], {"val/a": Marks(["cat"], [], {"dog": 0.4})})
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "samples.json").write_text(json.dumps({"samples": [
        {"filepath": "/somewhere/data/x/a.png", "ground_truth": {"_cls": "Classification", "label": "cat"}}]}))
    assert read_format("fiftyone", str(tmp_path)).samples == {"x/a": Marks(["cat"])}


def test_mistakes(shards, tmp_path, capsys):
    for form in sorted(FORMATS):
        assert main(["exchange", "read", form, str(tmp_path / "none"), "--shards", str(shards), "--sidecar", "x"]) == 2
        assert str(tmp_path / "none") in capsys.readouterr().err
    for name, form in (("annotations.json", "coco"), ("tasks.json", "label_studio"), ("samples.json", "fiftyone")):
        for text in ("[1]", '{"images": 3}', "{", '[{"data": 1}]'):
            (tmp_path / name).write_text(text)
            with pytest.raises(UserError, match=name.partition(".")[0] if text == "{" else str(tmp_path)):
                read_format(form, str(tmp_path))
    (tmp_path / "labels.csv").write_text("key,name,label\na,cat,maybe\n")
    with pytest.raises(UserError, match="line 2: label 'maybe'"):
        read_format("csv", str(tmp_path))
    (tmp_path / "labels.csv").write_text("key,name,label\na,cat,positive\n")
    command = ["exchange", "read", "csv", str(tmp_path), "--shards", str(shards), "--sidecar", "x"]
    assert main(command) == 2
    assert "none of its 1 samples" in capsys.readouterr().err
    key = ShardIndex.load(str(shards)).members(0).keys[0]
    (tmp_path / "labels.csv").write_text(f"key,name,label\n{key},unicorn,positive\n")
    assert main(command) == 2
    assert "'unicorn'" in capsys.readouterr().err
    (tmp_path / "labels.csv").write_text(f"key,name,label\n{key},1,positive\n{key},1,negative\n")
    assert main(command) == 2
    assert "as positive and as negative" in capsys.readouterr().err
