"""Proves that `lacuna shards make`, `index` and `check` work from the command line, with exit codes and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from lacuna.data_pipelines.readers import READERS
from lacuna.tools import cli


@pytest.fixture
def images(tmp_path):
    for number in range(20):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.RandomState(number).randint(0, 255, (8, 9, 3), dtype=np.uint8)).save(path)
    return str(tmp_path / "images")


def test_make_check_and_damage(images, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert cli.main(["shards", "make", "folder", "--images", images, "--out", out, "--streams", "4", "--json"]) == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert {k: facts[k] for k in ("samples", "shards", "classes", "positives", "skipped")} == {
        "samples": 20, "shards": 4, "classes": 2, "positives": 20, "skipped": 0}
    assert "packing: 20 of 20 samples" in captured.err, "plain lines when there is no terminal"
    assert cli.main(["shards", "check", out]) == 0
    assert "0 problems" in capsys.readouterr().out
    assert cli.main(["shards", "make", "folder", "--images", images, "--out", out]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main(["shards", "make", "folder", "--images", images, "--out", out, "--overwrite", "--no-shuffle"]) == 0
    assert "samples  20" in capsys.readouterr().out
    os.truncate(tmp_path / "out" / "shard-00002.tar", 700)
    assert cli.main(["shards", "check", out, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {p["shard"] for p in report["problems"]} == {"shard-00002.tar"}
    assert cli.main(["shards", "check", out]) == 1
    assert "problem: shard-00002.tar" in capsys.readouterr().out


def test_index(images, tmp_path, capsys):
    import webdataset

    (tmp_path / "tars").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "tars/x-%03d.tar"), maxcount=8, verbose=0) as sink:
        for number in range(20):
            png = (tmp_path / "images" / "ab"[number % 2] / f"{number}.png").read_bytes()
            sink.write({"__key__": f"{number:04d}", "png": png, "json": {"positives": ["b"[: number % 2] or "a"]}})
    (tmp_path / "classes.txt").write_text("a\nb\n")
    tars = str(tmp_path / "tars")
    assert cli.main(["shards", "index", tars]) == 2
    assert "--classes" in capsys.readouterr().err
    assert cli.main(["shards", "index", tars, "--classes", str(tmp_path / "classes.txt"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["samples"], facts["shards"], facts["positives"]) == (20, 3, 20)
    assert cli.main(["shards", "check", tars]) == 0


def test_every_reader_has_help(capsys):
    for name in READERS:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["shards", "make", name, "--help"])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert "--out" in text
        assert "the dataset:" in text


def test_absent_dataset(tmp_path, capsys):
    assert cli.main(["shards", "check", str(tmp_path)]) == 2
    assert "lacuna shards make" in capsys.readouterr().err


def test_make_does_not_wait_for_torch():
    """`make` starts in a second; only `check` needs the decoders."""
    code = "import sys, lacuna.tools.shards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
