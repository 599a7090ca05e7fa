"""Proves that vectors taken out of a tar together are those that are decoded one by one, unusual rows included."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines import shard_vectors
from lacuna.data_pipelines.decode import DecodeError
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.shard_vectors import ShardVectors
from lacuna.data_pipelines.stream import EpochStream
from tests.helpers.odd_shards import write_shards

WIDTH = 6


def npy(values: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values, **options)
    return buffer.getvalue()


def vector(shard: int, row: int) -> np.ndarray:
    return np.random.default_rng([shard, row]).normal(size=WIDTH).astype(np.float32)


def usual(shard: int, row: int) -> bytes:
    return npy(vector(shard, row))


def unusual(shard: int, row: int) -> bytes:
    """Every third row is another thing, three of which are no vector of ours."""
    values = vector(shard, row)
    kinds = [lambda: npy(values.astype(np.float64)), lambda: npy(values.astype(np.float16)),
             lambda: npy(values, version=(2, 0)), lambda: npy(np.append(values[1:], np.float32(np.nan))),
             lambda: npy(values[:4]), lambda: b"no array", lambda: npy(values.astype(">f4"))]
    return kinds[row // 3 % len(kinds)]() if row % 3 == 1 else npy(values)


def one_by_one(opened, maker: SampleMaker) -> tuple[dict[int, list[float]], dict[int, str]]:
    """The naive form."""
    good, bad = {}, {}
    for row in opened.used.tolist():
        views = torch.zeros(1, WIDTH)
        try:
            maker(opened.read(row), opened.shard, row, views)
            good[row] = views[0].tolist()
        except DecodeError as error:
            bad[row] = str(error)
    return good, bad


@pytest.mark.parametrize("contents", [usual, unusual, lambda s, r: npy(vector(s, r).astype(np.float16))])
def test_together_is_one_by_one(tmp_path, contents):
    source = write_shards(tmp_path, [40], contents, "feature")
    opened, maker = source.open(0), SampleMaker(None, 0, 0, WIDTH)
    good, bad = one_by_one(opened, maker)
    found = ShardVectors(opened, maker, WIDTH)
    assert {row: str(error) for row, error in found.bad.items()} == bad
    assert {row: found.values[row].tolist() for row in good} == good
    assert len(bad) == (6 if contents is unusual else 0)


def test_the_usual_shard_needs_no_call_per_sample(tmp_path, monkeypatch):
    opened = write_shards(tmp_path, [40], usual, "feature").open(0)
    monkeypatch.setattr(opened, "read", None)
    assert np.array_equal(ShardVectors(opened, None, WIDTH).values, [vector(0, row) for row in range(40)])


def test_long_names_and_other_members_in_between(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_vectors, "_MOST", 1 << 30)
    source = write_shards(tmp_path, [9], usual, "feature",
                          name=lambda shard, row: f"{shard}/{row}" if row % 2 else f"{shard}/{'x' * 120}{row}")
    values = ShardVectors(source.open(0), SampleMaker(None, 0, 0, WIDTH), WIDTH).values
    assert np.array_equal(values, [vector(0, row) for row in range(9)])


def test_a_tar_of_other_names_is_refused(tmp_path):
    source = write_shards(tmp_path, [5], usual, "feature")
    path = tmp_path / "shard-00000.tar"
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = tar.getmembers()[3].offset
    data[at : at + 3] = b"9/9"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"row 3 should be '0/3.npy'.*has '9/9.npy' there"):
        ShardVectors(source.open(0), SampleMaker(None, 0, 0, WIDTH), WIDTH)


@pytest.mark.parametrize("batch", [1, 7, 16, 64])
def test_steps_made_together_are_the_steps_of_the_plan(tmp_path, batch):
    source = write_shards(tmp_path, [30, 1, 44, 25, 12], unusual, "feature")
    plan = EpochPlan(source.counts, 3, 0, 1, batch)
    for start in (0, plan.steps // 2):
        with EpochStream(source, plan, range(1), SampleMaker(None, 3, 0, WIDTH), start_step=start) as stream:
            batches = list(stream)
        assert len(batches) == plan.steps - start
        for found, (shards, rows) in zip(batches, plan.batches(range(1), start), strict=True):
            assert found.planned.tolist() == shards.tolist()
            places = list(zip(shards.tolist(), rows.tolist(), strict=True))
            bad = {(int(sample.shard[-9:-4]), sample.row) for sample in found.bad}
            good = [place for place in places if place not in bad]
            assert list(zip(found.shards.tolist(), found.rows.tolist(), strict=True)) == good
            for place, inputs in zip(good, found.inputs, strict=True):
                assert np.allclose(inputs, vector(*place), atol=1e-3)
