"""Proves that a subset survives saving, that its fingerprint names its rows, and that damage is reported."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.subsets import Subset, subset_names
from tests.helpers.labelled_shards import write_dataset

SIZES = [9, 0, 8, 1, 17]


@pytest.fixture
def index(tmp_path) -> ShardIndex:
    return write_dataset(str(tmp_path), np.zeros((sum(SIZES), 3), np.int8), SIZES).index


def random_masks(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.random(n) < 0.5 for n in SIZES]


def test_masks_and_counts_survive(index):
    masks = random_masks()
    Subset.from_masks(index, "half", masks, {"scheme": "coin"}).save()
    loaded = Subset.load(index, "half")
    for shard, mask in enumerate(masks):
        np.testing.assert_array_equal(loaded.mask(shard), mask)
    assert loaded.counts.tolist() == [int(m.sum()) for m in masks]
    assert loaded.samples == sum(int(m.sum()) for m in masks)
    assert loaded.source == {"scheme": "coin"}
    assert subset_names(index) == ["half"]


def test_fingerprint_names_the_rows(index):
    one, same, other = (Subset.from_masks(index, n, random_masks(s), {}) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_damage_and_strangers_are_reported(index, tmp_path):
    Subset.from_masks(index, "half", random_masks(), {}).save()
    with pytest.raises(UserError, match=r"no subset named 'haf'; there are \['half'\]"):
        Subset.load(index, "haf")
    with pytest.raises(UserError, match="subset name"):
        Subset.from_masks(index, "../x", random_masks(), {})
    bits = tmp_path / "subsets" / "half.bin"
    good = bits.read_bytes()
    for bad in (good[:-1], bytes([good[0] ^ 128]) + good[1:]):
        bits.write_bytes(bad)
        with pytest.raises(UserError, match=r"does not fit half\.json"):
            Subset.load(index, "half")
    bits.write_bytes(good)
    described = tmp_path / "subsets" / "half.json"
    body = json.loads(described.read_text())
    for change, message in (({"index_fingerprint": "0"}, "another index"), ({"version": 9}, "version 9"),
                            ({"source": 3}, "damaged")):
        described.write_text(json.dumps({**body, **change}))
        with pytest.raises(UserError, match=message):
            Subset.load(index, "half")
    described.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        Subset.load(index, "half")
