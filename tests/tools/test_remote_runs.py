"""Proves that commands read a run on s3:// as they read its copy on a disk, and say what is wrong with a URL."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from lacuna.basics import storage
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.explore import open_desk
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.pool import Job, PoolSettings, ray_room
from lacuna.tools.passes.scoring import ScoreJob, shard_rows
from lacuna.tools.passes.trained import open_trained
from lacuna.tools.prior import PriorJob
from lacuna.tools.run_files import output_folder
from tests.helpers.launching import Launch, last_checkpoint

RAY = ("--workers", "1")


@dataclass(frozen=True)
class Two:
    """One run of EN+SCL: where it was trained, and a copy on this disk."""

    url: str
    copy: str
    shards: Path


@pytest.fixture
def run(s3, single_shards, tmp_path, monkeypatch) -> Two:
    root = f"s3://bucket/{tmp_path.name}"
    data = {split: {"url": str(single_shards / split)} for split in ("train", "val")}
    data["train"]["labels"] = "single"
    launch = Launch({
        "name": "scl", "run_folder": f"{root}/runs", "model": {"backbone": "lacuna:tiny"},
        "data": {**data, "image_size": 32, "normalize": "centered", "streams": 4, "augment": {"flip": False}},
        "method": {"name": "en_scl", "gamma": 0.1, "start_phase": 0},
        "train": {"log_every": 5, "keep": 9, "staging": str(tmp_path / "staging")},
        "phases": [{"name": "only", "epochs": 2, "batch": 64, "lr": 3e-3}]}, tmp_path, 1)
    launch.ok()
    url, copy = f"{root}/runs/scl", tmp_path / "copy" / "scl"
    for name in storage.list_tree(url):
        storage.download(name, str(copy / name.removeprefix(url + "/")))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return Two(url, str(copy), single_shards)


def call(capsys, *words: str) -> str:
    capsys.readouterr()
    code = main([*words])
    out, err = capsys.readouterr()
    assert code == 0, f"{words}: {err}"
    return out


def same(capsys, run: Two, command: str, *options: str) -> str:
    """What the command says about the copy; it says the same about the run itself, but for its name."""
    there, here = (call(capsys, command, place, *options, "--json") for place in (run.url, run.copy))
    assert there.replace(run.url, run.copy) == here
    return here


def score(job: Job, source: ShardSource, folder: str) -> None:
    """The parts that Ray workers would write (they do in the long form)."""
    work, parts = job.build(), Parts(folder, job.fingerprint)
    for shard in shard_rows(source):
        parts.write(shard, work(shard))


def files_below(folder: str | Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*"))
            if path.is_file()}


def test_commands_read_a_run_on_s3(run, capsys):
    before = storage.list_tree(run.url)
    look_at_the_run(run, capsys)
    with ray_room(PoolSettings(workers=1)):
        use_the_model(run, capsys)
    assert storage.list_tree(run.url) == before, "a run on object storage is only read"


def look_at_the_run(run: Two, capsys) -> None:
    """Its records and its state: inspect, heatmaps, report, explore."""
    assert json.loads(same(capsys, run, "inspect", "--values"))["snapshot"] == last_checkpoint(Path(run.copy)).name
    assert json.loads(same(capsys, run, "inspect", "--sample", "3/1"))["positives"]
    assert json.loads(call(capsys, "inspect", run.url + "/state", "--json"))["rows"] == 410
    call(capsys, "heatmaps", run.url, "--out", "there.png")
    call(capsys, "heatmaps", run.copy, "--out", "here.png")
    assert Path("there.png").read_bytes() == Path("here.png").read_bytes()
    page = json.loads(same(capsys, run, "report"))
    assert page["runs"][0]["curves"]["loss"]
    assert len(page["runs"][0]["beliefs"]["moments"]) == 2
    assert page["runs"][0]["strips"]["images"]
    page = json.loads(same(capsys, run, "report", "--score", "--samples", "40", "--images", "0"))
    assert page["runs"][0]["beliefs"]["origin"] == "scores of the kept checkpoints"
    written = call(capsys, "report", run.url).strip()
    assert written == f"{output_folder(run.url)}/report.html"
    assert Path(written).parent.parent == Path.cwd()
    assert "<html" in Path(written).read_text()[:200]
    same(capsys, run, "explore", "--index-only")
    assert files_below(output_folder(run.url) + "/explore") == files_below(run.copy + "/explore")
    there, here = (open_desk(place, None, Namespace(workers=1, address=None, parts=None, scores=None))
                   for place in (run.url, run.copy))
    first = here.page("missing", None, 0, 1)["items"][0]
    place = first["shard"], first["row"]
    assert there.sample(*place) == here.sample(*place)
    assert there.picture(*place, 300, first["class"]) == here.picture(*place, 300, first["class"])
    for desk in (there, here):  # `suggest` learns from it
        desk.decisions.decide((*place, first["class"]), "accept")
    assert Path(there.export("csv", "")["written"]).parent == Path(output_folder(run.url), "explore")


def use_the_model(run: Two, capsys) -> None:
    """Its best checkpoint: eval, export, predict, suggest, prior; per-shard results are on object storage, too."""
    trained, kept = open_trained(run.url), f"{run.url}-parts"
    assert trained.checkpoint.startswith(run.url)
    train = ShardSource.load(str(run.shards / "train"), "single", None)
    val = ShardSource.load(str(run.shards / "val"), "labels", None)
    for job, source in ((ScoreJob(trained, val), val), (ScoreJob(trained, train), train),
                        (PriorJob(trained, train), train)):
        score(job, source, kept)
    parts = ("--parts", kept, *RAY)
    same(capsys, run, "eval", "--shards", val.index.url, "--protocol", "multilabel", *parts)
    same(capsys, run, "suggest", "--out", "suggested.csv", "--precision", "0.5", *parts)
    call(capsys, "prior", run.url, *parts)
    call(capsys, "prior", run.copy, *parts)
    for ending in ("csv", "json"):
        made, expected = (Path(f"{output_folder(place)}/prior.{ending}").read_text() for place in (run.url, run.copy))
        assert made.replace(run.url, run.copy) == expected
    model = f"{run.url}-model"
    for place, out in ((run.url, model), (run.copy, "model")):
        call(capsys, "export", place, "--out", out, "--no-onnx", "--val", val.index.url, *parts)
    assert storage.read_bytes(model + "/model.safetensors") == Path("model/model.safetensors").read_bytes()
    assert main(["export", run.url, "--out", model, "--no-onnx"]) == 2, "there is a model"
    opened = val.open(0)
    for row in range(3):
        storage.write_atomic(f"{run.url}-photos/some/{row}.png", opened.read(row))
        storage.write_atomic(f"photos/some/{row}.png", opened.read(row))
    storage.write_atomic(f"{run.url}-photos/notes.txt", b"no image")
    there = call(capsys, "predict", model, f"{run.url}-photos", "--json")
    assert len(there.splitlines()) == 3
    assert there.replace(f"{run.url}-photos", "photos") == call(capsys, "predict", "model", "photos", "--json")


@pytest.mark.long
def test_ray_workers_read_a_run_on_s3(run, capsys, tmp_path, monkeypatch):
    """Nothing is prepared and nobody says where per-shard results go: they are gone at the end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = storage.list_tree(run.url)
    val = str(run.shards / "val")
    with ray_room(PoolSettings(workers=1)):
        for command in (("eval", "--shards", val, "--protocol", "multilabel"), ("suggest", "--out", "s.csv"),
                        ("prior", "--out", "p"), ("export", "--out", "model", "--overwrite", "--val", val)):
            same(capsys, run, *command, *RAY)
    assert storage.list_tree(run.url) == before
    assert not [path for path in tmp_path.glob("lacuna-passes-*/**/*") if path.is_file()]


COMMANDS = {"report": (), "explore": ("--index-only",), "inspect": (), "heatmaps": (), "prior": (),
            "suggest": ("--out", "s.csv"), "export": ("--out", "m", "--no-onnx"), "predict": ("x.jpg",),
            "eval": ("--shards", "s3://bucket/none", "--protocol", "multilabel")}


@pytest.fixture
def refused(s3, monkeypatch) -> Iterator[None]:
    """This process has a key that the server does not know."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    S3FileSystem.clear_instance_cache()
    yield
    S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_url_is_said(s3, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url, words in (("s3://bucket/no-such-run", "s3://bucket/no-such-run"),
                       ("s3://no-such-bucket/run", "s3://no-such-bucket/run"),
                       ("s4://bucket/run", "Protocol not known: s4")):
        assert main([command, url, *COMMANDS[command]]) == 2, url
        err = capsys.readouterr().err
        assert err.startswith(f"lacuna {command}: "), err
        assert words in err
    assert not list(tmp_path.iterdir()), "nothing is written about a run that is not there"


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_credentials_are_said(refused, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, "s3://bucket/runs/some", *COMMANDS[command]]) == 2
    err = capsys.readouterr().err
    assert "the storage refuses access" in err
    assert "AWS_SECRET_ACCESS_KEY" in err
    assert "not-the-secret" not in err
