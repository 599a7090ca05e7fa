"""Proves that a cached phase trains on what the fixed part gives, in the same order, whoever filled the cache."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.stream import EpochStream
from lacuna.state_store import derived
from lacuna.tools.trials.job import Job, perform
from lacuna.trainer.assemble import build_run
from lacuna.trainer.cache.phase_cache import Cache, cut_of
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.training_data import epoch_plan
from tests.helpers.cached_runs import STEPS, body, make_scenes, outcome, without_tars
from tests.helpers.launching import Launch, losses, trace
from tests.helpers.small_runs import Trainer


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture
def shards(scenes, tmp_path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(scenes, tmp_path / "shards"))


def built(trainer: Trainer, config: dict):
    run = build_run(parse_config(config, "test"), trainer.world, trainer.watchdog)
    run.model.cut = cut_of(run.model, run.config, 0, run.method.needs())
    return run


_QUERIES = {"head": "query2label", "head_norm": "none", "decoder": {"width": 16, "feedforward": 16}}


@pytest.mark.parametrize(("views", "method", "model", "trainable", "cut", "shape"), [
    (0, {"name": "an"}, {}, "head", "pooled features", (128,)),
    (2, {"name": "an"}, {}, "head", "pooled features", (128,)),
    (2, {"name": "en_scl"}, {}, "head", "feature maps", (128, 8, 8)),
    (2, {"name": "lac"}, {}, "head", "feature maps", (128, 8, 8)),
    (2, {"name": "an"}, {"head": "csra"}, "head", "feature maps", (128, 8, 8)),
    (2, {"name": "lac"}, _QUERIES, "head", "feature maps", (128, 8, 8)),
    (2, {"name": "an"}, {}, ["4", "6"], "the input of 4", (64, 16, 16)),
])
def test_outputs_are_those_of_the_images_in_the_same_order(trainer, scenes, tmp_path, views, method, model, trainable,
                                                           cut, shape):
    config = body(scenes, tmp_path, "run", {"views": views}, method, trainable=trainable)
    run = built(trainer, {**config, "model": {**config["model"], **model}})
    run.model.set_trainable(tuple(trainable) if isinstance(trainable, list) else trainable)
    cache = Cache(run, 0, run.config.phases[0].cache)
    assert (cache.views.fixed.cut, cache.views.fixed.shape) == (cut, shape)
    run.model.eval()
    source, maps = run.sources["train"], run.method.needs().maps
    for epoch in (0, 2):
        plan = epoch_plan(run.config, source, 0, epoch)
        view = cache.views.training(source, epoch)
        with cache.training(plan, 0, epoch) as cached, EpochStream(source, plan, range(4), view.maker) as plain:
            for kept, images in zip(cached, plain, strict=True):
                assert np.array_equal(kept.shards, images.shards)
                assert np.array_equal(kept.rows, images.rows)
                assert torch.equal(kept.labels, images.labels)
                assert torch.equal(kept.boxes, images.boxes)
                assert torch.equal(kept.flips, images.flips)
                with torch.no_grad():
                    pairs = [(kept.inputs, images.inputs)]
                    if images.strong is not None:
                        pairs.append((kept.strong_view, images.strong))
                    for half, pixels in pairs:
                        assert half.dtype == torch.float16
                        for found, wanted in zip(run.model(half, maps)[:2], run.model(pixels, maps)[:2], strict=True):
                            if wanted is not None:
                                torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    assert len({cache.views.training(source, epoch).url for epoch in range(4)}) == max(1, views)
    run.run_log.close()


def test_who_filled_the_cache_and_when_makes_no_difference(trainer, shards, tmp_path):
    cache = {"views": 2}
    trainer.train(body(shards, tmp_path, "filling", cache))
    without_tars(shards)
    trainer.train(body(shards, tmp_path, "reading", cache))
    assert outcome(tmp_path / "reading") == outcome(tmp_path / "filling")


@pytest.mark.parametrize("leave", [2, 5, STEPS + 4])
def test_killed_while_filling_and_resumed_is_never_killed(trainer, scenes, tmp_path, leave):
    whole, other = tmp_path / "whole", tmp_path / "other"
    trainer.train(body(scenes, whole, "run", {"views": 2}))
    trainer.train(body(scenes, other, "run", {"views": 2}), leave=leave)
    trainer.train(body(scenes, other, "run", {"views": 2}))
    assert outcome(other / "run") == outcome(whole / "run")


def test_damage_is_computed_again(trainer, shards, tmp_path):
    trainer.train(body(shards, tmp_path, "first", {"views": 1}))
    objects = sorted((tmp_path / ".cache").glob("*/shards/*"))
    for number, path in enumerate(objects):
        data = bytearray(path.read_bytes())
        if number % 4 == 0:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif number % 4 == 1:
            path.write_bytes(data[: len(data) // 3])
        elif number % 4 == 2:
            path.unlink()
    trainer.train(body(shards, tmp_path, "second", {"views": 1}))
    assert outcome(tmp_path / "second") == outcome(tmp_path / "first")
    assert sorted((tmp_path / ".cache").glob("*/shards/*")) == objects
    shutil.rmtree(tmp_path / ".cache")
    trainer.train(body(shards, tmp_path, "third", {"views": 1}))
    assert outcome(tmp_path / "third") == outcome(tmp_path / "first")


def test_other_weights_are_another_cache(trainer, scenes, tmp_path):
    """A run whose fixed part was changed ends as one that has the cache for itself."""
    backbone = built(trainer, body(scenes, tmp_path / "a", "run", None)).model.backbone
    files = {}
    for name, factor in (("one", 1.0), ("two", 1.5)):
        files[name] = str(tmp_path / f"{name}.safetensors")
        save_file({key: (factor * t if t.is_floating_point() else t).contiguous()
                   for key, t in backbone.state_dict().items()}, files[name])

    def trained(folder: str, name: str) -> tuple:
        config = body(scenes, tmp_path / folder, name, {"views": 1})
        trainer.train({**config, "model": {**config["model"], "weights": files[name]}})
        return outcome(tmp_path / folder / name)

    shared = [trained("shared", name) for name in ("one", "two")]
    views = len(list((tmp_path / "shared" / ".cache").iterdir()))
    assert trained("own", "two") == shared[1] != shared[0]
    assert views == 2 * len(list((tmp_path / "own" / ".cache").iterdir()))


def test_no_room_for_a_cache(trainer, scenes, tmp_path, monkeypatch):
    """The run ends with the reason; once there is room, it ends as if there had always been."""
    write, left = derived.storage.write_atomic, iter(range(5))

    def full(url: str, data: bytes, **options) -> None:
        if "/shards/" in url and next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), url)
        write(url, data, **options)

    trainer.train(body(scenes, tmp_path / "whole", "run", {"views": 1}))
    config = body(scenes, tmp_path / "full", "run", {"views": 1})
    with monkeypatch.context() as patched:
        patched.setattr(derived.storage, "write_atomic", full)
        refused = perform(Job("run", parse_config(config, "test"), key="k"))
    assert refused.status == "refused", "no trial is to blame"
    assert "no space left" in refused.reason
    assert "Nothing half-written is used. `lacuna cache --prune` makes room" in refused.reason
    trainer.train(config)
    assert outcome(tmp_path / "full" / "run") == outcome(tmp_path / "whole" / "run")


def test_methods_that_make_images_have_no_cache(trainer, scenes, tmp_path):
    config = body(scenes, tmp_path, "run", {"views": 1}, {"name": "ignore"})
    with pytest.raises(UserError, match=r"phases\.0\.cache: method 'ignore' makes new images"):
        built(trainer, config)


@pytest.mark.parametrize(("change", "words"), [
    ({"trainable": "all"}, r"phases\.0\.cache with trainable: all: what learns must lie at the end"),
    ({"trainable": ["0"]}, r"phases\.0\.cache with trainable: \['0'\]: what learns must lie at the end"),
])
def test_what_cannot_be_cut_is_refused(trainer, scenes, tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        built(trainer, body(scenes, tmp_path, "run", {"views": 1}, **change))


def test_two_ranks_fill_what_one_fills_and_learn_the_same(trainer, scenes, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    launch = Launch(body(scenes, two, "run", {"views": 2}), two, 2)
    trainer.train(body(scenes, one, "run", {"views": 2}))
    launch.ok()
    filled = sorted(path.relative_to(one) for path in one.glob(".cache/*/shards/*"))
    assert filled == sorted(path.relative_to(two) for path in two.glob(".cache/*/shards/*"))
    assert len(filled) == 3 * 8 + 2
    assert all((one / path).read_bytes() == (two / path).read_bytes() for path in filled)
    assert trace(one / "run") == trace(two / "run")
    np.testing.assert_allclose(losses(two / "run"), losses(one / "run"), rtol=1e-5)
