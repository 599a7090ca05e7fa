"""Proves that `lacuna train` trains a table's row on one rank and on several, becomes the process that trains, and
passes on signals and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import yaml

from lacuna.tools import launches
from lacuna.tools.cli import main
from tests.helpers.launching import environment, metrics
from tests.helpers.run_configs import config


@pytest.fixture(scope="module")
def table(digit_shards, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("train") / "mine.yaml"
    body = config(digit_shards, "unused", epochs=3)
    row = {"method": body.pop("method")}
    del body["name"]
    path.write_text(yaml.safe_dump({"about": "Ours.", "defaults": {**body, "run_folder": str(path.parent)},
                                    "rows": {"tiny": row}}))
    return path


def train(table: Path, *words: str) -> launches.Launch:
    """From another folder than the table's."""
    output = table.parent / f"{len(list(table.parent.glob('*.out')))}.out"
    return launches.Launch([sys.executable, "-m", "lacuna.tools.cli", "train", f"{table}:tiny", *words], str(output),
                           environment(), "/")


def test_a_row_is_trained_stopped_and_resumed_on_more_ranks(table, digit_shards):
    run = table.parent / "tiny"
    launch = train(table, "--ranks", "1", "train.log_every=1")
    launch.wait_until(lambda: len(metrics(run, "train")) >= 3, "step 3")
    assert f"--config\0{table}:tiny".encode() in Path(f"/proc/{launch.process.pid}/cmdline").read_bytes()
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.text()
    assert "stopped as asked" in launch.text()
    lines = launch.text().splitlines()
    assert f"data: 410 images of 10 classes in {digit_shards}/train, labels 'labels' (all classes known)" in lines[0]
    assert "method: epr, k = 2.20 positives per image; model: lacuna:tiny, weights none" in lines[1]
    steps = re.search(rf"run: {run} on 1 rank \(cpu\), (\d+) steps \(linear 3 × (\d+), all 3 × (\d+)\)", lines[2])
    assert steps
    assert int(steps[1]) == 3 * int(steps[2]) + 3 * int(steps[3])
    assert re.search(rf"linear epoch 1/3 step 2/{steps[2]} loss [\d.]+ lr 1.00e-03, [\d,]+ images/s, 0:[\d:]+ left in "
                     r"this epoch, about 0:\d\d:\d\d in all$", launch.text(), re.MULTILINE)
    assert not (run / "results.json").exists()
    launch = train(table, "train.log_every=1", "--ranks", "2")
    launch.alone = False
    launch.wait_until(lambda: len(launch.ranks()) == 2, "two ranks")
    assert b"start_ranks.py" in Path(f"/proc/{launch.process.pid}/cmdline").read_bytes(), "the starter itself"
    assert launch.wait() == 0, launch.text()
    assert json.loads((run / "results.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_exit_code_of_the_training_is_passed_on(table, ranks):
    launch = train(table, "data.train.url=/nowhere", "name=lost", "--ranks", str(ranks))
    assert launch.wait() == 2, launch.text()
    assert launch.text().count("/nowhere/index.json: no such file") == 1, "once, not once per rank"
    assert "[INFO]" not in launch.text()
    assert "runner.py" not in launch.text()


def test_mistakes_are_said_before_anything_starts(table, capsys):
    cases = {
        ("train", str(table)): "a table of 1 rows; name one",
        ("train", f"{table}:tiny", "train.kep=1"): "did you mean 'keep'?",
        ("train", f"{table}:tiny", "--ranks", "0"): "--ranks 0: must be 1 or more",
        ("train", f"{table}:tiny", "--hostfile", "/nowhere"): "--hostfile /nowhere: no such file",
    }
    for words, message in cases.items():
        assert main(list(words)) == 2
        assert message in capsys.readouterr().err
