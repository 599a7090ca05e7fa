"""Proves that `lacuna cache` fills on Ray what training would, lists it, and removes it when nobody uses it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from lacuna.tools.cli import main
from lacuna.tools.trials.job import placed
from lacuna.trainer.cache.views import cache_url
from lacuna.trainer.config.sections import parse_config
from tests.helpers.cached_runs import body, make_scenes, outcome, without_tars
from tests.helpers.small_runs import Trainer


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes"))


def written(config: dict, folder: Path) -> str:
    path = folder / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def listed(capsys, url: Path) -> list[dict]:
    capsys.readouterr()
    assert main(["cache", "--list", "--json", "--cache", str(url)]) == 0
    return json.loads(capsys.readouterr().out)["views"]


def test_filled_ahead_is_what_training_fills(scenes, tmp_path, capsys):
    trainer = Trainer()
    trainer.train(body(scenes, tmp_path / "while", "run", {"views": 2}))
    shards = Path(shutil.copytree(scenes, tmp_path / "shards"))
    config = body(shards, tmp_path / "ahead", "run", {"views": 2})
    assert main(["cache", written(config, tmp_path), "--workers", "2", "--json"]) == 0
    filled = json.loads(capsys.readouterr().out.splitlines()[-1])["views"]
    assert sorted(fact["samples"] for fact in filled) == [20, 110, 110, 110]  # val; two views, and that of evaluation
    there = listed(capsys, tmp_path / "ahead" / ".cache")
    assert {fact["address"]: fact["samples"] for fact in there} == {f["address"]: f["samples"] for f in filled}
    assert {fact["address"] for fact in there} == {f["address"] for f in listed(capsys, tmp_path / "while" / ".cache")}
    for path in (tmp_path / "while" / ".cache").glob("*/shards/*"):
        assert path.read_bytes() == (tmp_path / "ahead" / path.relative_to(tmp_path / "while")).read_bytes(), path
    without_tars(shards)
    trainer.train(config)
    assert outcome(tmp_path / "ahead" / "run") == outcome(tmp_path / "while" / "run")

    cache = tmp_path / "ahead" / ".cache"
    idle, unknown = (cache / fact["address"] for fact in there[:2])
    facts = json.loads((idle / "facts.json").read_text())
    (idle / "facts.json").write_text(json.dumps({**facts, "used": facts["used"] - 31 * 86_400}))
    (unknown / "facts.json").write_text("{")
    assert main(["cache", "--prune", "--cache", str(cache)]) == 0
    assert sorted(os.listdir(cache)) == sorted(fact["address"] for fact in there[2:])
    assert main(["cache", "--prune", "0", "--cache", str(cache)]) == 0
    assert not os.listdir(cache)
    assert "removed 2 views" in capsys.readouterr().out


def test_mistakes_are_named(scenes, tmp_path, capsys):
    plain = written(body(scenes, tmp_path, "plain", None), tmp_path)
    for words, said in (
            (["cache"], "give a config whose caches are to be filled"),
            (["cache", plain], "no phase has a cache. Give one, e.g. phases.0.cache={views: 0}"),
            (["cache", plain, "--cache", "x"], "give train.cache_url=URL"),
            (["cache", "--prune", "-1"], "--prune -1"),
            (["cache", plain, "phases.0.cache={views: 400}", "train.cache_budget_gb=0.0001"],
             "phases.0.cache: 5 views (training, validation, test) take 0.000 GB, 0.3 kB per sample and view"),
            (["cache", plain, "phases.0.cache={views: 0}", "phases.0.trainable=all"], "must lie at the end"),
    ):
        assert main(words) == 2, words
        assert said in capsys.readouterr().err, words


def test_runs_of_a_search_share_the_cache_of_the_config(scenes, tmp_path):
    cached = body(scenes, tmp_path / "runs", "mine", {"views": 1})
    own = cache_url(parse_config(cached, "test"))
    found = [placed(cached, str(tmp_path / "out"), name, "test") for name in ("trial-0", "trial-1")]
    assert [cache_url(config) for config in found] == [own, own]
    assert cache_url(placed({**cached, "train": {"cache_url": "s3://b/c"}}, "out", "trial", "test")) == "s3://b/c"
