"""Proves that lacuna.dataset and lacuna.stream give every sample exactly once, with the sidecar's labels."""

from __future__ import annotations

import pickle
import shutil

import fsspec
import numpy as np
import pytest
import torch
import webdataset as wds
import yaml
from torch.utils.data import DataLoader, IterableDataset

import lacuna
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from tests.helpers.launching import Launch, trace


def place(sample: dict) -> tuple[int, int]:
    return sample["shard"], sample["row"]


def everything(url) -> list[tuple[int, int]]:
    index = ShardIndex.load(str(url))
    return [(shard, row) for shard in range(len(index.shards)) for row in range(index.shards[shard].count)]


def test_samples_are_those_of_the_tars_with_their_labels(single_shards):
    url = str(single_shards / "train")
    source = ShardSource.load(url, "single", None)
    data = lacuna.dataset(url, labels="single")
    assert isinstance(data, IterableDataset)
    assert isinstance(data, wds.DataPipeline)
    assert data.classes == source.index.classes
    found = list(data)
    assert [place(sample) for sample in found] == everything(url)
    assert len(found) == data.samples
    for sample in found[::37]:
        shard, row = place(sample)
        opened = source.open(shard)
        assert sample["__key__"] == opened.members.keys[row]
        assert torch.equal(sample["image"], decode_image(opened.read(row)))
        assert sample["labels"].dtype == torch.int8
        np.testing.assert_array_equal(sample["labels"], opened.labels.dense(source.classes)[row])
        assert (sample["labels"] == 1).sum() == 1  # a single positive, the rest unknown
        assert (sample["labels"] == -1).sum() == source.classes - 1


@pytest.mark.parametrize("shuffle", [0, 50])
def test_two_workers_give_every_sample_exactly_once(single_shards, shuffle):
    url = str(single_shards / "train")
    data = lacuna.dataset(url, labels="single", shuffle=shuffle).map(place)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    epochs = [[tuple(int(n) for n in pair) for pair in loader] for _ in range(2)]
    for found in epochs:
        assert sorted(found) == everything(url)
        assert found != everything(url)  # two workers take turns


def test_shuffling_is_reproducible_and_differs_by_epoch_and_seed(single_shards):
    def orders(seed: int) -> list[list[tuple[int, int]]]:
        data = lacuna.dataset(str(single_shards / "train"), shuffle=100, seed=seed, decode=None)
        return [[place(sample) for sample in data] for _ in range(2)]

    first, again, other = orders(1), orders(1), orders(2)
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]
    assert all(sorted(order) == everything(single_shards / "train") for order in [*first, *other])


def test_ranks_share_the_shards(single_shards, monkeypatch):
    """webdataset's own split by node, which reads the launcher's variables."""
    url, found = str(single_shards / "val"), []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        found.append([place(sample) for sample in lacuna.dataset(url, decode=None)])
    assert all(found)
    assert sorted(pair for part in found for pair in part) == everything(url)


def test_webdatasets_decoders_and_stages_go_on_from_here(single_shards):
    data = lacuna.dataset(str(single_shards / "val"), decode="pil").to_tuple("image", "labels")
    image, labels = next(iter(data))
    assert image.size == (32, 32)
    assert labels.shape == (10,)
    raw = next(iter(lacuna.dataset(str(single_shards / "val"), decode=None)))["image"]
    assert isinstance(raw, bytes)
    batches = lacuna.dataset(str(single_shards / "val")).to_tuple("image", "labels").batched(16)
    images, labels = next(iter(batches))
    assert images.shape == (16, 3, 32, 32)
    assert labels.shape == (16, 10)


def test_a_subset_leaves_the_other_rows_out(digit_shards, tmp_path):
    url = str(tmp_path / "val")
    shutil.copytree(digit_shards / "val", url)
    index = ShardIndex.load(url)
    masks = [np.arange(shard.count) % 3 == 0 for shard in index.shards]
    Subset.from_masks(index, "third", masks, {}).save()
    found = [place(sample) for sample in lacuna.dataset(url, subset="third", decode=None)]
    assert found == [(s, r) for s, r in everything(url) if r % 3 == 0]


def test_what_is_missing_is_named(digit_shards, tmp_path):
    with pytest.raises(lacuna.UserError, match=r"no label sidecar named 'nope'; there are \['labels'\]"):
        lacuna.dataset(str(digit_shards / "val"), labels="nope")
    url = tmp_path / "val"
    shutil.copytree(digit_shards / "val", url)
    (url / "shard-00001.tar").unlink()
    with pytest.raises(lacuna.UserError, match=r"shard-00001.tar: this shard is in the index"):
        list(lacuna.dataset(str(url)))


def test_it_reads_any_fsspec_url(digit_shards):
    memory = fsspec.filesystem("memory")
    memory.put(str(digit_shards / "val"), "/lacuna-api/val", recursive=True)
    try:
        found = [place(sample) for sample in lacuna.dataset("memory://lacuna-api/val", shuffle=10)]
    finally:
        memory.rm("/lacuna-api", recursive=True)
    assert sorted(found) == everything(digit_shards / "val")


# ---- the exact stream


def config_of(data, tmp_path, name="traced", **train):
    return {"name": name, "data": {"train": {"url": str(data / "train"), "labels": "single"}, "image_size": 32,
                                   "normalize": "centered", "streams": 4},
            "model": {"backbone": "lacuna:tiny"}, "method": {"name": "an"}, "seed": 5,
            "train": {"trace_samples": True, **train},
            "phases": [{"name": "one", "epochs": 1, "batch": 32, "lr": 1e-3},
                       {"name": "two", "epochs": 2, "batch": 16, "lr": 1e-3}]}


def test_the_stream_is_what_training_read(single_shards, tmp_path):
    """Step by step the samples that a real 2-rank run wrote down, in every phase and epoch, for one and two ranks."""
    launch = Launch(config_of(single_shards, tmp_path), tmp_path, 2)
    launch.ok()
    config = lacuna.load_config(str(launch.folder / "config.yaml"))
    traced, step = trace(launch.folder), 0
    for phase, epochs in enumerate((1, 2)):
        for epoch in range(epochs):
            whole = list(lacuna.stream(config, phase=phase, epoch=epoch))
            halves = [list(lacuna.stream(config, phase=phase, epoch=epoch, rank=r, world=2)) for r in range(2)]
            for batch, *parts in zip(whole, *halves, strict=True):
                step += 1
                mine = set(zip(batch.shards.tolist(), batch.rows.tolist(), strict=True))
                assert mine == traced[step]
                assert mine == {pair for p in parts for pair in zip(p.shards.tolist(), p.rows.tolist(), strict=True)}
    assert step == max(traced)


def test_the_stream_resumes_at_any_step_and_repeats(single_shards, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"run_folder": str(tmp_path), **config_of(single_shards, tmp_path)}))
    config = lacuna.load_config(str(path))
    data = lacuna.stream(config)
    first, again = list(data), list(data)
    late = list(lacuna.stream(config, start_step=7))
    assert len(first) == len(data) == len(late) + 7
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.inputs, b.inputs)
    for a, b in zip(first[7:], late, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.labels, b.labels)
    with pytest.raises(lacuna.UserError, match=r"phase 1, epoch 2: .* \[1, 2\] epochs"):
        lacuna.stream(config, phase=1, epoch=2)


def test_the_stream_in_two_workers_is_still_exactly_once(single_shards, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"run_folder": str(tmp_path), **config_of(single_shards, tmp_path)}))
    data = lacuna.stream(lacuna.load_config(str(path)))
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    found = [pair for batch in loader for pair in zip(batch.shards.tolist(), batch.rows.tolist(), strict=True)]
    assert sorted(found) == everything(single_shards / "train")
    pickle.dumps(data)


def test_annotating_anew_changes_the_labels_only(digit_shards, tmp_path):
    url = str(tmp_path / "val")
    shutil.copytree(digit_shards / "val", url)
    index = ShardIndex.load(url)
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "one", "single_positive", SCHEMES["single_positive"]())
    full, single = (list(lacuna.dataset(url, labels=name)) for name in ("labels", "one"))
    for a, b in zip(full, single, strict=True):
        assert torch.equal(a["image"], b["image"])
        assert (a["labels"][b["labels"] == 1] == 1).all()
