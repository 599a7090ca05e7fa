"""`lacuna plan` against a real run: disk, memory and I/O within 20 %; what will not fit is named with its option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lacuna import state_store
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.tools import launches
from lacuna.tools.cli import main
from lacuna.tools.launches import read_lines
from tests.helpers.launching import ROOT, command, environment, last_checkpoint


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    pack(digits.read(1500, "train"), str(folder / "train"), Layout(streams=1, rows_per_shard=50), workers=1)
    index = ShardIndex.load(str(folder / "train"))
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "single", "single_positive",
             SCHEMES["single_positive"]())
    return folder


def config(shards: Path, folder: Path) -> Path:
    path = folder / "planned.yaml"
    path.write_text(yaml.safe_dump({
        "name": "planned", "run_folder": str(folder), "model": {"backbone": "lacuna:tiny", "expected_positives": 2.2},
        "data": {"train": {"url": str(shards / "train"), "labels": "single"}, "image_size": 32, "normalize": "centered",
                 "streams": 2, "open_shards": 2, "augment": {"crop": "random_resized"}},
        "method": {"name": "en_scl"},
        "phases": [{"name": "all", "epochs": 3, "batch": 50, "lr": 1e-3}],
        "train": {"log_every": 1, "keep": 1, "state_budget_mb": 64},
    }))
    return path


def plan(capsys, *arguments: str) -> tuple[int, dict]:
    code = main(["plan", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


class Counted:
    """A real run, with its I/O, memory and disk as it counted them itself."""

    def __init__(self, path: Path, folder: Path):
        notes = folder / "counted.jsonl"
        words = command(1, str(notes), "--config", str(path), script=str(ROOT / "tests" / "helpers" / "counted_run.py"))
        launch = launches.Launch(words, str(folder / "counted.out"), environment(), str(folder))
        assert launch.wait() == 0, launch.text()[-5000:]
        self.seen = read_lines(str(notes))
        self.peak, self.disk = (max(line[key] for line in self.seen) for key in ("peak", "disk"))
        self.folder = folder / "planned"

    def between(self, first: int, last: int) -> dict[str, int]:
        """Bytes read and written from the end of one step to the end of another."""
        start, end = (next(line for line in self.seen if line["step"] >= step) for step in (first, last))
        return {kind: end[kind] - start[kind] for kind in ("rchar", "wchar")}


def test_predictions_are_within_a_fifth_of_what_is_measured(shards, tmp_path, capsys):
    path = config(shards, tmp_path)
    # Its two epochs end the calibration: on a busy machine the usual time would, with few rows of the state written.
    code, planned = plan(capsys, str(path), "--seconds", "600")
    assert (code, planned["problems"]) == (0, [])
    assert (planned["samples"], planned["shards"]) == (1500, 30)
    run = Counted(path, tmp_path)
    steps = planned["phases"][0]["steps_per_epoch"]
    train = [line for line in read_lines(str(run.folder / "metrics.jsonl")) if line["kind"] == "train"]
    assert len(train) == planned["phases"][0]["steps"] == 3 * steps

    store = state_store.open(str(run.folder / "state"))
    refs = store.manifest(last_checkpoint(run.folder).name).refs
    for field in planned["fields"]:
        measured = sum(ref.size for ref in refs[field["name"]].values())
        assert field["bytes"] == pytest.approx(measured, rel=0.2), field["name"]
    assert planned["disk"]["state_peak"] == pytest.approx(run.disk, rel=0.2)
    assert planned["ram_per_rank"]["total"] == pytest.approx(run.peak, rel=0.2)

    io = planned["io_per_epoch"]
    # From just after the first epoch to just after the second: its steps and its checkpoint.
    measured = run.between(steps + 1, 2 * steps + 1)
    assert io["data_read"] + io["state_read"] == pytest.approx(measured["rchar"], rel=0.2)
    assert io["state_written"] + io["checkpoints_written"] == pytest.approx(measured["wchar"], rel=0.2)


def test_what_does_not_fit_names_the_option(shards, tmp_path, capsys):
    path = str(config(shards, tmp_path))
    code, planned = plan(capsys, path, "--seconds", "0", "train.state_budget_mb=0.2")
    assert code == 1
    assert "train.state_budget_mb = 0.2" in planned["problems"][0]
    assert "raise it to" in planned["problems"][0] or "Raise the budget" in planned["problems"][0]
    code, planned = plan(capsys, path, "--seconds", "0", "train.keep=1000000000")
    assert code == 1
    assert any(p.startswith("state: ") and "lower train.keep" in p for p in planned["problems"])
    assert main(["plan", path, "--seconds", "0"]) == 0
    text = capsys.readouterr().out
    assert "1,500 samples of 10 classes in 30 shards" in text
    assert "everything fits" in text
    assert main(["plan", path, "--ranks", "3"]) == 2
    assert "not a multiple of the 3 ranks" in capsys.readouterr().err


def test_every_phase_has_its_own_time(shards, tmp_path, capsys):
    """A network of which the head learns, then all of it; K would come from the validation set."""
    body = yaml.safe_load(config(shards, tmp_path).read_text())
    body |= {"model": {"backbone": "torchvision:resnet18"}, "method": {"name": "en"},
             "phases": [{"name": "head", "epochs": 4, "batch": 16, "lr": 1e-3, "trainable": "head"},
                        {"name": "whole", "epochs": 2, "batch": 32, "lr": 1e-3, "warmup": "100st"}]}
    body["data"]["val"] = {"url": str(shards / "train")}
    path = tmp_path / "phases.yaml"
    path.write_text(yaml.safe_dump(body))
    code, planned = plan(capsys, str(path), "--seconds", "6")
    assert code == 0
    head, whole = planned["seconds"]["step"]
    assert min(head, whole) > 0
    steps = [phase["steps_per_epoch"] for phase in planned["phases"]]
    assert planned["seconds"]["epoch"] == pytest.approx([head * steps[0], whole * steps[1]])
    assert planned["seconds"]["run"] == pytest.approx(4 * head * steps[0] + 2 * whole * steps[1])
    weights = 11.2e6 * 4
    assert planned["disk"]["checkpoint"] > 2.9 * weights, "the second phase's optimizer is in its checkpoints"


def test_a_cache_is_counted_and_refused_when_it_does_not_fit(shards, tmp_path, capsys):
    path = str(config(shards, tmp_path))
    cached = ["--seconds", "0", "phases.0.trainable=head", "phases.0.cache={views: 2}"]
    code, found = plan(capsys, path, *cached)
    row = 20 + 2 * 128 * 8 * 8  # flags and box; half-precision maps of lacuna:tiny at 32 px
    assert code == 0
    assert found["caches"] == [{"phase": "all", "cut": "feature maps", "shape": [128, 8, 8], "views": 2,
                                "bytes_per_sample": row, "bytes": 2 * 1500 * row, "bytes_there": 0}]
    code, found = plan(capsys, path, *cached, "train.cache_budget_gb=0.01")
    assert (code, len(found["problems"])) == (1, 1)
    assert "2 views (training, validation, test) take 0.049 GB, 16.4 kB per sample" in found["problems"][0]
    assert "train.cache_budget_gb allows 0.01" in found["problems"][0]
    code, found = plan(capsys, path, *cached, "train.state_budget_mb=2")
    assert code == 1
    assert any("of what phase 'all' caches, a rank leases" in problem for problem in found["problems"])
