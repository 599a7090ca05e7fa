"""K is estimated from the images whose labels are complete, and from no others; views that a method cannot use are
refused."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex, SidecarWriter
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.trainer.assemble import check_method, load_sources, mean_positives
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Task
from tests.helpers.method_steps import method_of
from tests.helpers.run_configs import config


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """120 scenes: one positive each, but all labels of the 40 scenes of the subset `checked`."""
    folder = tmp_path_factory.mktemp("checked")
    for split in ("train", "val"):
        pack(digits.read(120, split), str(folder / split), Layout(streams=1, rows_per_shard=30), workers=1)
    source = ShardSource.load(str(folder / "train"), "labels", None)
    rng, masks = np.random.default_rng(0), []
    writer = SidecarWriter(source.index, "mixed", UNKNOWN, {})
    for shard, rows in enumerate(source.index.counts):
        full = source.sidecar.labels(shard).dense(source.classes)
        one = np.where(np.cumsum(full == POSITIVE, axis=1) == 1, full, NEGATIVE)
        checked = rng.permutation(rows) < 10
        writer.write(shard, SparseLabels.from_dense(np.where(checked[:, None], full, np.where(one == 1, 1, UNKNOWN))))
        masks.append(checked)
    writer.close()
    Subset.from_masks(source.index, "checked", masks, {}).save()
    return folder


def sources_of(shards, **data):
    body = config(shards, "x")
    body["data"] |= {"test": None, **data}
    body["data"]["train"]["labels"] = "mixed"
    return load_sources(parse_config(body, "test"))


def counted(source: ShardSource) -> float:
    """By hand: positives of the rows that take part, per row."""
    rows = []
    for shard in range(len(source.index.shards)):
        full = source.sidecar.labels(shard).dense(source.classes)
        rows.append(full[slice(None) if source.subset is None else source.subset.mask(shard)])
    return float((np.concatenate(rows) == POSITIVE).sum(1).mean())


def test_a_fully_labelled_subset_comes_before_val(shards):
    train = str(shards / "train")
    sources = sources_of(shards, fully_labelled={"url": train, "labels": "mixed", "subset": "checked"})
    k = mean_positives(sources)
    assert sources["fully_labelled"].counts.sum() == 40
    assert k == pytest.approx(counted(ShardSource.load(train, "labels", "checked")))
    only_val = mean_positives(sources_of(shards))
    assert only_val == pytest.approx(counted(ShardSource.load(str(shards / "val"), "labels", None)))
    assert k != only_val

    index = ShardIndex.load(train)
    ones = np.full(len(index.classes), 12)
    task = Task(len(ones), 120, ones, ones * 0, False, expected_positives=k)
    assert build_method({"name": "role"}, task).k == pytest.approx(k)
    # EN counts per annotated positive, of which there is one an image here.
    np.testing.assert_array_equal(build_method({"name": "en"}, task).quotas, np.rint(k * ones))


def test_incomplete_labels_are_refused_or_not_used(shards):
    train = str(shards / "train")
    with pytest.raises(UserError, match=r"data\.fully_labelled: [\d,]+ of the 120 × 10 labels .*'mixed' are unknown"):
        mean_positives(sources_of(shards, fully_labelled={"url": train, "labels": "mixed"}))
    assert mean_positives(sources_of(shards, val={"url": train, "labels": "mixed"})) is None
    assert mean_positives(sources_of(shards, val=None)) is None
    with pytest.raises(UserError, match=r"data\.fully_labelled, or a fully labelled data\.val"):
        build_method({"name": "epr"}, Task(4, 2, np.ones(4), np.zeros(4), False))


@pytest.mark.parametrize(("name", "data", "message"), [
    ("en_scl", {"augment": {"randaugment": 2}}, "data.augment.randaugment = 2 moves pixels"),
    ("scob", {}, "data.strong_augment = {crop: squash, randaugment: 2, …}, but method 'scob' compares the same places"),
    ("scob", {"strong_augment": {"crop": "same", "randaugment": 1}}, "randaugment: 1, …}"),
    ("scob", {"strong_augment": {"crop": "same"}}, None), ("lac", {}, None),
    ("en", {"augment": {"randaugment": 2}}, None)])
def test_views_that_move_what_a_method_compares(shards, name, data, message):
    body = config(shards, "x")
    body["data"] |= data
    body["method"] = {"name": name}
    parsed, method = parse_config(body, "test"), method_of(name, np.zeros((2, 3), np.int8))
    if message is None:
        check_method(parsed, method)
    else:
        with pytest.raises(UserError) as caught:
            check_method(parsed, method)
        assert message in str(caught.value)


def test_a_method_for_the_backbone_does_not_train_a_head_alone(shards):
    body = config(shards, "x")
    body["data"] |= {"strong_augment": {"crop": "same"}}
    body["method"] = {"name": "scob"}
    body["phases"] = [{"name": f"{part}{i}", "epochs": 1, "batch": 8, "lr": 1e-3, "trainable": part}
                      for i, part in enumerate(("head", "head", "all"))]
    method = method_of("scob", np.zeros((2, 3), np.int8))
    check_method(parse_config(body, "test"), method)
    del body["phases"][2]
    with pytest.raises(UserError, match=r"phases: only the head learns .* method 'scob' adds"):
        check_method(parse_config(body, "test"), method)
