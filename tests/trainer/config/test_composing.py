"""Configs are composed from bases and overrides as written, mistakes are named, and fingerprints name what counts."""

from __future__ import annotations

import pytest
import yaml

from lacuna.basics.errors import UserError
from lacuna.trainer.config.files import load_config, merge
from lacuna.trainer.config.sections import parse_config

BODY = {"name": "x", "data": {"train": {"url": "/data/train"}, "val": {"url": "/data/val"}},
        "method": {"name": "an_ls", "smoothing": 0.2},
        "phases": [{"name": "a", "epochs": 1, "batch": 8, "lr": 0.1}]}


@pytest.fixture
def write(tmp_path):
    def write(name: str, body: dict | str) -> str:
        (tmp_path / name).write_text(body if isinstance(body, str) else yaml.safe_dump(body))
        return str(tmp_path / name)

    return write


def test_bases_are_merged_in_order_and_the_files_own_keys_win(write, tmp_path):
    (tmp_path / "parts").mkdir()
    write("parts/data.yaml", {"base": "deeper.yaml", "data": {"train": {"url": "/a"}, "image_size": 64}})
    write("parts/deeper.yaml", {"train": {"keep": 5, "log_every": 7}, "data": {"image_size": 32, "streams": 4}})
    write("parts/train.yaml", {"train": {"keep": 3}})
    path = write("top.yaml", {"base": ["parts/data.yaml", "parts/train.yaml"], "name": "top",
                              "phases": BODY["phases"], "data": {"streams": 2}})
    config = load_config(path, ["data.val.url=/b", "phases.0.lr=1e-3", "name=2024"])
    assert (config.train.keep, config.train.log_every) == (3, 7)
    assert (config.data.image_size, config.data.streams, config.data.train.url) == (64, 2, "/a")
    assert (config.data.val.url, config.phases[0].lr, config.name) == ("/b", 1e-3, "2024")


def test_another_method_starts_without_the_settings_of_the_first(write):
    assert merge(BODY, {"method": {"name": "an"}})["method"] == {"name": "an"}
    assert merge(BODY, {"method": {"smoothing": 0.3}})["method"] == {"name": "an_ls", "smoothing": 0.3}
    path = write("x.yaml", BODY)
    assert load_config(path, ["method.name=an"]).method == {"name": "an"}
    assert load_config(path, ["method.smoothing=0.4", "method.name=bce_ls"]).method == {
        "name": "bce_ls", "smoothing": 0.4}
    assert load_config(path, ["method.name=an_ls"]).method == BODY["method"]


def test_mistakes_in_files_are_named(write, tmp_path):
    cases = {
        write("loop.yaml", {"base": "loop2.yaml"}): "leads back to itself",
        write("loop2.yaml", {"base": "loop.yaml"}): "leads back to itself",
        write("lost.yaml", {"base": "nowhere.yaml"}): "lost.yaml: base",
        write("twice.yaml", "name: a\ntrain: {keep: 1}\ntrain: {keep: 2}\n"): "key 'train' twice",
        write("list.yaml", "- a\n- b\n"): "expected keys and values, found list",
        write("bad.yaml", "name: [a\n"): "not valid YAML",
        str(tmp_path): "is a directory",
    }
    for path, message in cases.items():
        with pytest.raises(UserError) as caught:
            load_config(path, [])
        assert message in str(caught.value), path


def test_anchors_and_merge_keys_still_work(write):
    path = write("anchor.yaml", "name: x\ndata: {train: {url: /a}}\nphases:\n"
                 "  - &first {name: a, epochs: 1, batch: 8, lr: 0.1}\n  - {<<: *first, name: b}\n")
    assert [phase.name for phase in load_config(path, []).phases] == ["a", "b"]


def test_text_that_is_no_unicode_is_named():
    with pytest.raises(UserError, match="x: text that is no valid Unicode"):
        parse_config(BODY | {"method": {"name": {chr(0xD800): None}}}, "x")


def test_mistakes_in_values_name_the_key_and_what_is_legal(write):
    path = write("x.yaml", BODY)
    cases = {
        "name=[a": "is not valid YAML",
        "train.precision=fp16": "train.precision = 'fp16': Input should be 'fp32' or 'bf16'.",
        "train.checkpoint_every=0st": "must be longer than 0",
        "train.checkpoint_every=5": "train.checkpoint_every = 5: duration 5: write steps as '500st'",
        "phases.0.schedule=one_cycle": "phases.0: schedule = 'one_cycle' needs the length of its rise",
        "phases.0.lr=.inf": "phases.0.lr = inf",
        "phases.0.trainable=heads": "phases.0.trainable = 'heads': write head, all, or a list of parts of the backbone",
        "phases.0.trainable=[]": "write head, all, or a list",
        "phases.0.trainable=[all, layer4]": "write head, all, or a list",
        "phases.0.trainable=[layer4, '']": "write head, all, or a list",
        "data.augment.scale=[1, 0.5]": "0 < a <= b <= 1",
        "data.augment.crop=same": "data: augment.crop = 'same' is for strong_augment",
        "data.augment.color_jitter=[0.4, 0.4, 0.4, 0.6]": "less than or equal to 0.5",
        "phases=[{name: a, epochs: 1, batch: 8, lr: 1}, {name: a, epochs: 1, batch: 8, lr: 1}]": "two are named 'a'",
        "data.train.url.x=1": "data.train.url is a single value",
        "data.valu.url=/x": "unknown key 'data.valu'; did you mean 'val'?",
    }
    for override, message in cases.items():
        with pytest.raises(UserError) as caught:
            load_config(path, [override])
        assert message in str(caught.value), override


def test_parts_to_train_are_part_of_the_fingerprint(write):
    path = write("x.yaml", BODY)
    whole, part = (load_config(path, override) for override in ([], ["phases.0.trainable=[head, 6, layer4.0]"]))
    assert part.phases[0].trainable == ("head", "6", "layer4.0")
    assert parse_config(part.model_dump(mode="json"), "again") == part
    assert whole.differences(part) == ["phases.0.trainable: 'all' → ('head', '6', 'layer4.0')"]


def test_fingerprints_ignore_where_and_how_fast_and_differences_name_the_rest():
    config = parse_config(BODY, "x")
    moved = parse_config(merge(BODY, {"name": "y", "run_folder": "/else", "train": {"keep": 9, "micro_batch": 2},
                                      "data": {"train": {"url": "s3://b/train"}, "workers": 7,
                                               "max_bad_fraction": 0.5}}), "y")
    assert moved.fingerprint() == config.fingerprint()
    assert config.differences(moved) == []
    other = parse_config(merge(BODY, {"seed": 3, "phases": [{**BODY["phases"][0], "lr": 0.2}]}), "z")
    assert other.fingerprint() != config.fingerprint()
    assert config.differences(other) == ["phases.0.lr: 0.1 → 0.2", "seed: 0 → 3"]
