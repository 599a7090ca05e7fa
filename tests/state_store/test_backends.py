"""Proves that the disk store and the memory backend keep one contract."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from tests.helpers.state.conformance import SEED, Conformance
from tests.helpers.state.memory import MemoryStore
from tests.helpers.state.samples import COUNTS, FIELDS, INITIALS, assert_same, initial_state, naive_counts


class TestMemory(Conformance):
    def make(self):
        return MemoryStore(COUNTS, "index-1", FIELDS, SEED)


class TestDisk(Conformance):
    def make(self):
        return state_store.create(str(self.folder / "state"), COUNTS, "index-1", FIELDS, SEED)

    def test_a_small_budget_is_explained(self, store):
        """Fewer slots than open shards is an error that names the remedy, not a hang."""
        launch = store.begin_launch()
        with pytest.raises(UserError, match=r"holds no shard.*needs"):
            store.session(launch, budget=100)
        with store.session(launch, budget=self.budget, initials=INITIALS) as session:
            slots = session.slots.count
            assert 2 <= slots < len(COUNTS)
            for shard in range(slots):
                session.lease(shard)
            with pytest.raises(UserError, match=r"RAM budget too small.*Raise"):
                session.lease(slots)

    def test_out_of_order_leases_give_way(self, store):
        """A shard that was not announced takes the slot of one read ahead; nothing hangs and nothing is lost."""
        state = initial_state(SEED)
        with self.open(store) as session:
            session.begin([0, 1, 2, 3], 0)
            for shard in (5, 4, 3, 0, 2, 1):
                session.lease(shard)
                rows = np.arange(COUNTS[shard])
                np.testing.assert_array_equal(session.gather("phi", np.full(len(rows), shard), rows),
                                              state["phi"][shard])
                session.release(shard)
            session.finish()

    def test_initial_counts_can_be_given(self, store):
        """Counts that the caller knows spare the pass over the initial values, and changes are added to them."""
        state, known = initial_state(SEED), naive_counts(initial_state(SEED)["ema"])
        with self.open(store, initial_counts={"ema": known}) as session:
            np.testing.assert_array_equal(session.histogram("ema")[0], known)
            self.train(session, state, 0)
            np.testing.assert_array_equal(sum(session.histogram("ema")), naive_counts(state["ema"]))

    def test_a_store_travels_to_spawned_processes(self, store):
        """A store can be pickled (data workers are spawned); a session belongs to its process."""
        again = pickle.loads(pickle.dumps(store))
        assert again.snapshots() == []
        assert again.schema.differences(store.schema) == []

    def test_exchanges_without_commit_leave_nothing_behind(self, store):
        """Versions that were exchanged, superseded and never committed are gone after the next commit, not at the next
        launch; so are those whose snapshots were deleted under a running session."""
        state = initial_state(SEED)
        with self.open(store) as session:
            for epoch in range(3):
                self.train(session, state, epoch)
                session.adopt([session.prepare(durable=False)])
            session.snapshot("a")
            assert store.orphans() == []
            self.train(session, state, 3)
            session.snapshot("b")
            session.collect([])
            for epoch in (4, 5):
                self.train(session, state, epoch, order=list(range(len(COUNTS))))
            session.snapshot("c")
            assert store.orphans() == []
            assert_same(session, state)

    def test_clean_shards_are_not_written(self, store):
        """Leasing without scattering writes nothing."""
        with self.open(store) as session:
            session.begin(list(range(len(COUNTS))), 0)
            for shard in range(len(COUNTS)):
                session.lease(shard)
                session.release(shard)
            session.finish()
            assert session.metrics.chunks_written == 0
            assert session.metrics.leases == len(COUNTS)
