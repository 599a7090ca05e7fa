"""Proves that top-p cut-offs choose exactly the rows that sorting the whole matrix would, on one rank and on two."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.state_store.cutoffs import Cutoffs, exact_cutoffs
from lacuna.state_store.histograms import change, counts, initial_counts
from lacuna.state_store.row_hash import tie_keys
from lacuna.state_store.sweep import map_shards
from tests.helpers.state.memory import MemoryStore

COUNTS, L = [40, 31, 40, 17], 12


def fill(session, values: dict[str, list[np.ndarray]]) -> None:
    session.begin(range(len(COUNTS)), 0)
    for shard, count in enumerate(COUNTS):
        session.lease(shard)
        for field, shards in values.items():
            session.scatter(field, np.full(count, shard), np.arange(count), shards[shard])
        session.release(shard)
    session.finish()


def scores(dtype: str, kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    top = np.iinfo(dtype).max
    draws = {
        "spread": lambda n: rng.integers(0, top, (n, L), endpoint=True),
        "tied": lambda n: rng.integers(0, 3, (n, L)) * (top // 3),
        "mostly zero": lambda n: np.where(rng.random((n, L)) < 0.05, top, 0),
    }
    return [draws[kind](n).astype(dtype) for n in COUNTS]


def excluded(shard: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(shard)
    return np.nonzero(rng.random((COUNTS[shard], L)) < 0.2)


def oracle(shards: list[np.ndarray], quotas: np.ndarray, cut: Cutoffs, outside) -> list[np.ndarray]:
    """Sort every column of the whole matrix by (score down, tie key up) and take the first p."""
    chosen = [np.zeros(rows.shape, bool) for rows in shards]
    for column in range(L):
        entries = []
        for shard, rows in enumerate(shards):
            skip = set(zip(*(a.tolist() for a in outside(shard)), strict=True)) if outside else set()
            for row in range(len(rows)):
                if (row, column) not in skip:
                    key = tie_keys(np.uint64(cut.tie_key), np.array([shard * max(COUNTS) + row]), np.array([column]))[0]
                    entries.append((-int(rows[row, column]), int(key), shard, row))
        for _, _, shard, row in sorted(entries)[: quotas[column]]:
            chosen[shard][row, column] = True
    return chosen


@pytest.fixture
def make(tmp_path):
    """A session whose field holds the given scores."""
    opened = []

    def build(shards: list[np.ndarray], outside=None, memory=False):
        field = state_store.Field("ema", (L,), str(shards[0].dtype), range=(0, 1), histogram=True)
        store = (MemoryStore(COUNTS, "i", [field], 2) if memory
                 else state_store.create(str(tmp_path / "s"), COUNTS, "i", [field], 2))
        session = store.session(store.begin_launch(), budget=10**6, excluded={"ema": outside} if outside else None)
        opened.append(session)
        fill(session, {"ema": shards})
        return session

    yield build
    for session in opened:
        session.close()


@pytest.mark.parametrize("outside", [None, excluded], ids=["all", "excluded"])
@pytest.mark.parametrize("limit", [10**6, 3])
@pytest.mark.parametrize("kind", ["spread", "tied", "mostly zero"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_exactly_the_top_rows(make, dtype, kind, limit, outside):
    """The chosen set equals the full sort's for quotas from none to all, also when ties must be narrowed in passes."""
    shards = scores(dtype, kind)
    session = make(shards, outside)
    quotas = np.array([0, 1, 2, 5, 17, 50, 63, 64, 65, 100, 127, 10**6])
    total = sum(session.histogram("ema"))
    cut = exact_cutoffs(session, "ema", quotas, total, salt=3, excluded=outside, limit=limit)
    expected = oracle(shards, quotas, cut, outside)
    chosen = 0
    for shard, rows in enumerate(shards):
        got = cut.selected(rows, np.full(len(rows), shard), np.arange(len(rows)))
        if outside:
            got[outside(shard)] = False
        np.testing.assert_array_equal(got, expected[shard])
        chosen = chosen + got.sum(axis=0)
    np.testing.assert_array_equal(chosen, np.minimum(quotas, total.sum(axis=1)))
    again = Cutoffs.from_arrays(cut.to_arrays())
    np.testing.assert_array_equal(again.selected(shards[1], np.full(31, 1), np.arange(31)),
                                  cut.selected(shards[1], np.full(31, 1), np.arange(31)))


def test_salt_changes_only_ties(make):
    """Another epoch chooses other rows among equals, and the same rows when there are none."""
    shards = scores("uint8", "tied")
    session = make(shards)
    total = sum(session.histogram("ema"))
    picks = []
    for salt in (1, 1, 2):
        cut = exact_cutoffs(session, "ema", np.full(L, 20), total, salt=salt)
        picks.append(np.concatenate([cut.selected(rows, np.full(len(rows), s), np.arange(len(rows)))
                                     for s, rows in enumerate(shards)]))
    np.testing.assert_array_equal(picks[0], picks[1])
    assert (picks[0] != picks[2]).any()


class ThreadExchange:
    """Ranks as threads: sums and gathers through a barrier."""

    def __init__(self, world: int):
        self.barrier, self.slots = threading.Barrier(world), [None] * world

    def rank(self, rank: int):
        outer = self

        class One:
            def gather(self, array):
                outer.slots[rank] = array
                outer.barrier.wait()
                parts = list(outer.slots)
                outer.barrier.wait()
                return parts

            def sum(self, array):
                return np.sum(self.gather(array), axis=0)

        return One()


@pytest.mark.parametrize("limit", [10**6, 3])
def test_ranks_agree_with_one(make, limit):
    """Two ranks that each read half of the shards get the cut-offs of one."""
    shards = scores("uint16", "mostly zero")
    session = make(shards)
    total, quotas = sum(session.histogram("ema")), np.arange(L) * 9
    alone = exact_cutoffs(session, "ema", quotas, total, salt=0)
    exchange, results = ThreadExchange(2), [None, None]

    def work(rank: int) -> None:
        results[rank] = exact_cutoffs(session, "ema", quotas, total, salt=0, exchange=exchange.rank(rank), rank=rank,
                                      world=2, limit=limit)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        for shard, rows in enumerate(shards):
            where = np.full(len(rows), shard), np.arange(len(rows))
            np.testing.assert_array_equal(result.selected(rows, *where), alone.selected(rows, *where))


def test_counts_of_changes_and_of_initial_values():
    """hist(after) − hist(before) and the closed form of constants equal full counts, with and without exclusions."""
    rng = np.random.default_rng(0)
    for dtype in ("uint8", "uint16"):
        before, after = (rng.integers(0, np.iinfo(dtype).max, (40, L)).astype(dtype) for _ in range(2))
        after[::2] = before[::2]
        for outside in (None, excluded(0)):
            expected = counts(after, outside) - counts(before, outside)
            np.testing.assert_array_equal(change(before, after, outside), expected)
    given = scores("uint8", "spread")
    for initial in (state_store.Constant(0.3), state_store.Draw(0, 1), state_store.Given()):
        field = state_store.Field("ema", (L,), "uint8", initial, range=(0, 1), histogram=True)
        for outside in (None, excluded):
            start = [np.array(field.initial_rows(1, s, n, given.__getitem__)) for s, n in enumerate(COUNTS)]
            expected = sum(counts(rows, outside(s) if outside else None) for s, rows in enumerate(start))
            got = initial_counts(field, 1, np.array(COUNTS), given.__getitem__, outside)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("memory", [False, True])
def test_map_shards_is_ordered_and_stops(make, memory):
    """Every shard once, in order, from several threads; an error in one comes out; stopping early is clean."""
    shards = scores("uint8", "spread")
    session = make(shards, memory=memory)
    sums = list(map_shards(session, ["ema"], lambda s, rows: (s, int(rows["ema"].sum())), threads=3))
    assert sums == [(s, int(rows.sum())) for s, rows in enumerate(shards)]
    assert next(map_shards(session, ["ema"], lambda s, rows: s)) == 0

    def fail(shard, rows):
        raise UserError(f"shard {shard}")

    with pytest.raises(UserError, match="shard 0"):
        list(map_shards(session, ["ema"], fail))


def test_cutoffs_check_their_input(make):
    """Quotas of the wrong length and fields without a histogram are named."""
    session = make(scores("uint8", "spread"))
    with pytest.raises(UserError, match=r"quotas \(3,\)"):
        exact_cutoffs(session, "ema", np.zeros(3), np.zeros((L, 256)), 0)
