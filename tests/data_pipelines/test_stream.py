"""Proves that streams deliver every sample once with the same pixels whatever ranks and workers, and end cleanly."""

from __future__ import annotations

import gc
import io
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.augment import Augment, sample_rng
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.color import grayscale
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream
from lacuna.data_pipelines.subsets import Subset
from tests.helpers.odd_shards import CLASSES, image_bytes, row_labels, write_shards

SIZE = 8


AUGMENT = Augment(SIZE, crop="random_resized", flip=True)


def run(source: ShardSource, plan: EpochPlan, rank: int = 0, world: int = 1, **options) -> list[Batch]:
    maker = SampleMaker(AUGMENT, plan.seed, plan.epoch)
    with EpochStream(source, plan, plan.rank_streams(rank, world), maker, **options) as stream:
        return list(stream)


def samples(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.shards.tolist(), batch.rows.tolist(), strict=True))


def assert_same(a: Batch, b: Batch) -> None:
    assert samples(a) == samples(b)
    for left, right in ((a.inputs, b.inputs), (a.labels, b.labels), (a.boxes, b.boxes), (a.flips, b.flips)):
        assert torch.equal(left, right)


@pytest.mark.parametrize("counts", [[9, 7, 8, 10, 3, 1], [5, 2], [0, 11, 0, 6, 0, 0, 9, 0], [1] * 7, [20]])
def test_every_sample_once_on_any_number_of_ranks(tmp_path, counts):
    source = write_shards(tmp_path / "shards", counts)
    plan = EpochPlan(source.counts, 5, 1, 4, 8, 3)
    everything = sorted((shard, row) for shard, count in enumerate(counts) for row in range(count))
    one = run(source, plan)
    assert sorted(pair for batch in one for pair in samples(batch)) == everything
    for world in (2, 4):
        ranks = [run(source, plan, rank, world) for rank in range(world)]
        assert {len(batches) for batches in ranks} == {plan.steps}, "ranks would wait for each other for ever"
        for step in range(plan.steps):
            together = [pair for batches in ranks for pair in samples(batches[step])]
            assert sorted(together) == sorted(samples(one[step]))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ShardSource:
    return write_shards(tmp_path_factory.mktemp("stream") / "shards", [14, 9, 16, 11, 13, 12, 15, 10])


def test_samples_are_what_decode_and_augment_make_of_them(source):
    plan = EpochPlan(source.counts, 5, 2, 2, 8)
    for batch in run(source, plan):
        for i, (shard, row) in enumerate(samples(batch)):
            image = decode_image(image_bytes(shard, row))
            pixels, box, flipped = AUGMENT(image, sample_rng(5, 2, shard, row))
            assert torch.equal(batch.inputs[i], pixels)
            assert batch.boxes[i].tolist() == pytest.approx(box)
            assert bool(batch.flips[i]) == flipped
            expected = SparseLabels.from_lists(*([ids] for ids in row_labels(shard, row))).dense(CLASSES)[0]
            assert batch.labels[i].tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{"workers": 1, "prefetch": 1}, {"workers": 3, "prefetch": 2},
                                     {"workers": 8, "prefetch": 9}])
def test_workers_do_not_matter(source, options):
    plan = EpochPlan(source.counts, 0, 0, 2, 6)
    for a, b in zip(run(source, plan), run(source, plan, **options), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("start", [1, 5, 12, 13])
def test_resume_is_the_suffix(source, start):
    plan = EpochPlan(source.counts, 1, 3, 4, 8)
    assert plan.steps == 13
    whole, rest = run(source, plan, 1, 2), run(source, plan, 1, 2, start_step=start)
    assert len(rest) == plan.steps - start
    for a, b in zip(whole[start:], rest, strict=True):
        assert_same(a, b)


def test_subset_gives_rows_of_the_tar(source):
    masks = [np.arange(shard.count) % 3 == 1 for shard in source.index.shards]
    chosen = ShardSource(source.index, source.sidecar, Subset.from_masks(source.index, "third", masks, {}))
    batches = run(chosen, EpochPlan(chosen.counts, 0, 0, 2, 4))
    wanted = sorted((shard, row) for shard, mask in enumerate(masks) for row in np.flatnonzero(mask).tolist())
    assert sorted(pair for batch in batches for pair in samples(batch)) == wanted


def test_corrupt_samples_are_named_and_left_out(tmp_path):
    broken = {(0, 3): b"", (1, 0): b"no image", (2, 5): image_bytes(2, 5)[:40]}
    source = write_shards(tmp_path / "shards", [6, 5, 8],
                          lambda shard, row: broken.get((shard, row), image_bytes(shard, row)))
    batches = run(source, EpochPlan(source.counts, 0, 0, 1, 4))
    bad = {(int(Path(b.shard).stem[-5:]), b.row): b for batch in batches for b in batch.bad}
    assert set(bad) == set(broken)
    assert bad[1, 0].key == "1/0"
    assert "not a JPEG, PNG or WebP (starts with 6e6f20696d616765)" in bad[1, 0].reason
    good = [pair for batch in batches for pair in samples(batch)]
    assert len(good) == len(set(good)) == 19 - 3
    assert not set(good) & set(broken)
    for batch in batches:
        assert len(batch) == len(batch.inputs) == len(batch.labels) == len(batch.boxes) == len(batch.flips)
        for i, (shard, row) in enumerate(samples(batch)):
            expected = AUGMENT(decode_image(image_bytes(shard, row)), sample_rng(0, 0, shard, row))[0]
            assert torch.equal(batch.inputs[i], expected)


def test_a_batch_without_a_good_sample_is_empty(tmp_path):
    source = write_shards(tmp_path / "shards", [4], lambda shard, row: b"broken")
    (batch,) = run(source, EpochPlan(source.counts, 0, 0, 1, 4))
    assert batch.inputs.shape == (0, 3, SIZE, SIZE)
    assert len(batch.bad) == 4


def test_feature_shards(tmp_path):
    def vector(shard: int, row: int) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.full(7 if (shard, row) != (1, 2) else 6, shard * 100 + row, np.float16))
        return buffer.getvalue()

    source = write_shards(tmp_path / "shards", [5, 4], vector, "feature")
    plan = EpochPlan(source.counts, 0, 0, 1, 3)
    with EpochStream(source, plan, range(1), SampleMaker(None, 0, 0, 7)) as stream:
        batches = list(stream)
    for batch in batches:
        assert batch.inputs.dtype == torch.float32
        assert batch.inputs[:, 6].tolist() == [shard * 100 + row for shard, row in samples(batch)]
    assert [b.reason for batch in batches for b in batch.bad] == ["vector of 6 numbers, the others have 7"]


def test_micro_batches_are_cuts(source):
    batch = run(source, EpochPlan(source.counts, 0, 0, 2, 10))[0]
    parts = [batch.narrow(0, 4), batch.narrow(4, 8), batch.narrow(8, 12)]
    assert [len(part) for part in parts] == [4, 4, 2]
    assert [pair for part in parts for pair in samples(part)] == samples(batch)
    assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)


def stream_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith(("decode", "open-shard"))}


def open_tars(source: ShardSource) -> int:
    """Descriptors of this process that point into the dataset's folder."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(source.index.url) for link in links if os.path.lexists(link))


def test_an_error_in_a_worker_reaches_the_reader(tmp_path):
    source = write_shards(tmp_path / "shards", [6, 6, 6, 6])
    (tmp_path / "shards" / "shard-00002.tar").unlink()
    with pytest.raises(UserError, match=r"shard-00002\.tar: this shard is in the index but not in the folder"):
        run(source, EpochPlan(source.counts, 0, 0, 1, 2))
    assert not stream_threads()
    gc.collect()
    assert open_tars(source) == 0


def test_leaving_early_ends_threads_and_closes_shards(source):
    plan = EpochPlan(source.counts, 0, 0, 2, 4)
    for seen, _ in enumerate(EpochStream(source, plan, range(2), SampleMaker(AUGMENT, 0, 0))):
        assert len(stream_threads()) >= 2
        if seen == 2:
            break
    gc.collect()
    assert not stream_threads()
    assert open_tars(source) == 0
    with EpochStream(source, plan, range(2), SampleMaker(AUGMENT, 0, 0)) as stream:
        next(iter(stream))
    assert not stream_threads()


@pytest.mark.parametrize("prefetch", [1, 4])
def test_few_shards_are_open_at_a_time_and_none_in_the_end(tmp_path, prefetch):
    source = write_shards(tmp_path / "shards", [24] * 24)
    plan = EpochPlan(source.counts, 0, 0, 2, 8, open_shards=3)
    most = 0
    with EpochStream(source, plan, range(2), SampleMaker(AUGMENT, 0, 0), prefetch=prefetch) as stream:
        for _ in stream:
            most = max(most, open_tars(source))
    assert 4 <= most <= 2 * (3 + 1)
    gc.collect()
    assert open_tars(source) == 0


def test_torch_threads_of_others_are_left_alone(source):
    """Workers run torch single-threaded; the caller, and threads that start later, keep their setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found: dict[str, int] = {}

        class Asking(SampleMaker):
            def __call__(self, *args):
                found[threading.current_thread().name] = torch.get_num_threads()
                return super().__call__(*args)

        plan = EpochPlan(source.counts, 0, 0, 2, 4)
        with EpochStream(source, plan, range(2), Asking(AUGMENT, 0, 0), workers=3) as stream:
            batches = iter(stream)
            next(batches)
            later = threading.Thread(target=lambda: found.update(later=torch.get_num_threads()))
            later.start()
            later.join()
            assert torch.get_num_threads() == 3
        assert found.pop("later") == 3
        assert set(found.values()) == {1}
    finally:
        torch.set_num_threads(before)


def test_a_second_view_has_its_own_draws_and_leaves_the_first_alone(tmp_path):
    broken = (1, 2)
    source = write_shards(tmp_path / "shards", [6, 5],
                          lambda shard, row: b"no image" if (shard, row) == broken else image_bytes(shard, row))
    plan = EpochPlan(source.counts, 5, 1, 1, 4, 2)
    strong = Augment(SIZE, crop="random_resized", flip=True, cutout=0.5)
    with EpochStream(source, plan, range(1), SampleMaker(AUGMENT, plan.seed, plan.epoch, strong=strong)) as stream:
        twice = list(stream)
    for one, two in zip(run(source, plan), twice, strict=True):
        assert_same(one, two)
        assert one.strong is None
        assert two.strong is not None
        for i, (shard, row) in enumerate(samples(two)):
            rng = sample_rng(plan.seed, plan.epoch, shard, row)
            image = decode_image(image_bytes(shard, row))
            AUGMENT(image, rng)
            assert torch.equal(two.strong[i], strong(image, rng)[0]), "the draws go on where the first view's ended"
        assert torch.equal(two.narrow(1, 3).strong, two.strong[1:3])


def test_a_second_view_of_the_same_crop_differs_in_colour_only(tmp_path):
    source = write_shards(tmp_path / "shards", [6, 5], image_bytes)
    plan = EpochPlan(source.counts, 5, 1, 1, 4, 2)
    for chance in (0.0, 1.0):
        strong = Augment(SIZE, crop="same", flip=True, grayscale=chance)
        with EpochStream(source, plan, range(1), SampleMaker(AUGMENT, plan.seed, plan.epoch, strong=strong)) as stream:
            for batch in stream:
                assert batch.strong is not None
                expected = batch.inputs if not chance else torch.stack([grayscale(image) for image in batch.inputs])
                assert torch.equal(batch.strong, expected)
