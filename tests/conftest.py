"""Shared fixtures: small sets of digit scenes, packed once per test session."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipelines.annotate import SCHEMES, annotate
from data_pipelines.annotate_rows import LabelledRows
from data_pipelines.index import ShardIndex, Sidecar
from data_pipelines.packing import Layout, pack
from data_pipelines.readers import digits


@pytest.fixture(scope="session")
def digit_shards(tmp_path_factory) -> Path:
    """train (410 scenes in 13 uneven shards), val and test (60 each) with full labels, in the sidecar `labels`."""
    folder = tmp_path_factory.mktemp("digits")
    for split, count, rows in (("train", 410, 32), ("val", 60, 16), ("test", 60, 16)):
        pack(digits.read(count, split), str(folder / split), Layout(streams=1, rows_per_shard=rows), workers=1)
    return folder


@pytest.fixture(scope="session")
def single_shards(digit_shards) -> Path:
    """The same, with one positive a scene in train's sidecar `single`."""
    index = ShardIndex.load(str(digit_shards / "train"))
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "single", "single_positive",
             SCHEMES["single_positive"]())
    return digit_shards
