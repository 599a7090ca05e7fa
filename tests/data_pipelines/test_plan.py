"""Every sample is in exactly one global batch of an epoch, and batches do not depend on the number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix, mix_array
from lacuna.data_pipelines.plan import EpochPlan


def global_batches(plan: EpochPlan, world: int, start: int = 0) -> list[set[tuple[int, int]]]:
    """What all ranks together see at every step."""
    per_rank = [list(plan.batches(plan.rank_streams(r, world), start)) for r in range(world)]
    return [
        {(int(s), int(r)) for rank in per_rank for s, r in zip(*rank[step], strict=True)}
        for step in range(plan.steps - start)
    ]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    streams=st.sampled_from([1, 2, 4, 8]),
    quota=st.integers(1, 5),
    open_shards=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_exactly_once_and_independent_of_the_world(counts, streams, quota, open_shards, epoch):
    plan = EpochPlan(np.array(counts), 7, epoch, streams, streams * quota, open_shards)
    everything = {(s, r) for s, n in enumerate(counts) for r in range(n)}
    one = global_batches(plan, 1)
    assert sum(len(b) for b in one) == len(everything)
    assert set().union(*one) == everything
    left = [sum(counts[s] for s in shards) for shards in plan.stream_shards]
    for batch in one:  # every stream gives its quota until it has nothing left
        assert len(batch) == sum(min(quota, n) for n in left) > 0
        left = [max(0, n - quota) for n in left]
    assert not any(left)
    for world in (w for w in (2, 4) if streams % w == 0):
        assert global_batches(plan, world) == one


@pytest.mark.parametrize("counts", [[5, 5, 1], [3], [0, 0, 7, 0], [1] * 9, [100, 1, 1, 1, 1]])
def test_odd_shapes(counts):
    plan = EpochPlan(np.array(counts), 0, 0, 4, 8, 3)
    batches = global_batches(plan, 4)
    assert sum(len(b) for b in batches) == sum(counts)
    assert len(set().union(*batches)) == sum(counts)


def test_resume_is_a_suffix():
    plan = EpochPlan(np.full(20, 37), 3, 2, 4, 16, 3)
    whole = list(plan.batches(plan.rank_streams(1, 2)))
    for start in (0, 1, 17, plan.steps - 1, plan.steps):
        rest = list(plan.batches(plan.rank_streams(1, 2), start))
        assert len(rest) == plan.steps - start
        for (a, b), (c, d) in zip(whole[start:], rest, strict=True):
            assert np.array_equal(a, c)
            assert np.array_equal(b, d)


def test_at_most_m_shards_are_open_and_openings_are_staggered():
    plan = EpochPlan(np.full(40, 50), 1, 0, 2, 10, 4)
    shards = np.concatenate([s for s, _ in plan.walk(0)])
    first = {s: int(np.flatnonzero(shards == s)[0]) for s in plan.stream_shards[0]}
    last = {s: int(np.flatnonzero(shards == s)[-1]) for s in plan.stream_shards[0]}
    alive = [sum(first[s] <= t <= last[s] for s in first) for t in range(len(shards))]
    assert max(alive) <= 4
    assert np.mean(alive) > 2.5
    closings = np.sort(list(last.values()))
    assert np.diff(closings).min() > 5, "closings come in bursts"


def test_order_changes_with_epoch_and_seed_and_mixes_shards():
    def order(seed, epoch):
        return [tuple(map(int, pair)) for s, r in EpochPlan(np.full(8, 30), seed, epoch, 1, 4, 4).walk(0)
                for pair in zip(s, r, strict=True)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 1)
    assert len({s for s, _ in order(0, 0)[:20]}) >= 3


def test_uneven_shards_give_balanced_streams():
    counts = np.random.default_rng(0).integers(1, 100, 200)
    samples = EpochPlan(counts, 0, 0, 8, 64).stream_samples
    assert samples.max() - samples.min() <= 100


def test_errors_name_the_key():
    with pytest.raises(UserError, match=r"data\.streams = 3 .*global batch 8.*e\.g\. 2"):
        EpochPlan(np.array([4]), 0, 0, 3, 8)
    with pytest.raises(UserError, match=r"data\.streams = 4 .*3 ranks"):
        EpochPlan(np.array([4]), 0, 0, 4, 8).rank_streams(0, 3)


def test_array_hash_continues_the_scalar_hash():
    assert [int(h) for h in mix_array(mix(5, 6), np.arange(4))] == [mix(5, 6, i) for i in range(4)]
