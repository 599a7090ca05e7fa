"""Proves by random sequences of operations that the disk store behaves like a dict, crashes included."""

from __future__ import annotations

import shutil
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lacuna import state_store
from tests.helpers.state.samples import (
    COUNTS,
    FIELDS,
    INITIALS,
    assert_same,
    copied,
    initial_state,
    naive_counts,
    random_stored,
)

SHARDS = st.integers(0, len(COUNTS) - 1)


class StoreMachine(RuleBasedStateMachine):
    """The model: `now` is the session's state, `kept` the committed snapshots, `leased` the open shards."""

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed):
        self.folder = tempfile.mkdtemp()
        self.store = state_store.create(self.folder + "/state", COUNTS, "index", FIELDS, seed)
        self.seed, self.now, self.kept, self.leased, self.step = seed, initial_state(seed), {}, set(), 0
        self.session = None
        self.launch(None)

    def launch(self, snapshot):
        launch = self.store.begin_launch()
        self.session = self.store.session(launch, budget=6_000, initials=INITIALS, snapshot=snapshot)

    @precondition(lambda self: len(self.leased) < 3)
    @rule(shard=SHARDS)
    def lease(self, shard):
        if shard not in self.leased:
            self.session.lease(shard)
            self.leased.add(shard)

    @precondition(lambda self: self.leased)
    @rule(seed=st.integers(0, 2**30), count=st.integers(1, 9))
    def scatter(self, seed, count):
        rng = np.random.default_rng(seed)
        pairs = [(s, r) for s in sorted(self.leased) for r in range(COUNTS[s])]
        picked = [pairs[i] for i in rng.permutation(len(pairs))[:count]]
        shards, rows = np.array([p[0] for p in picked]), np.array([p[1] for p in picked])
        field = FIELDS[rng.integers(len(FIELDS))]
        stored = random_stored(rng, field, len(rows))
        self.session.scatter(field.name, shards, rows, stored)
        for (s, r), value in zip(picked, stored, strict=True):
            self.now[field.name][s][r] = value

    @precondition(lambda self: self.leased)
    @rule()
    def gather(self):
        for shard in self.leased:
            rows = np.arange(COUNTS[shard])
            for field in FIELDS:
                got = self.session.gather(field.name, np.full(len(rows), shard), rows)
                np.testing.assert_array_equal(got, self.now[field.name][shard])

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data):
        shard = data.draw(st.sampled_from(sorted(self.leased)))
        self.session.release(shard)
        self.leased.remove(shard)

    @rule(order=st.permutations(range(len(COUNTS))), length=st.integers(0, len(COUNTS)))
    def announce(self, order, length):
        self.session.begin([s for s in order[:length] if s not in self.leased], self.step)

    @rule()
    def snapshot(self):
        self.step += 1
        self.session.snapshot(f"s{self.step}")
        self.kept[f"s{self.step}"] = copied(self.now)

    @rule()
    def exchange(self):
        self.session.adopt([self.session.prepare(durable=False)])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def collect(self, data):
        keep = data.draw(st.sets(st.sampled_from(sorted(self.kept))))
        self.session.collect(sorted(keep))
        self.kept = {name: state for name, state in self.kept.items() if name in keep}

    @precondition(lambda self: not self.leased)
    @rule(data=st.data())
    def restore(self, data):
        name = data.draw(st.sampled_from([None, *sorted(self.kept)]))
        self.session.restore(name)
        self.now = copied(self.kept[name]) if name else initial_state(self.seed)

    @rule(data=st.data(), tidy=st.booleans())
    def crash(self, data, tidy):
        """The session ends without a commit, cleanly or as a kill would leave it; a new launch takes over."""
        if tidy:
            self.session.close()
        else:
            self.session._io.stop()
        name = data.draw(st.sampled_from([None, *sorted(self.kept)]))
        self.store = state_store.open(self.folder + "/state", COUNTS, "index", FIELDS, self.seed)
        self.launch(name)
        self.now = copied(self.kept[name]) if name else initial_state(self.seed)
        self.leased = set()
        assert self.store.orphans() == []

    @precondition(lambda self: not self.leased)
    @rule()
    def compare(self):
        self.session.finish()
        assert_same(self.session, self.now)
        base, change = self.session.histogram("ema")
        np.testing.assert_array_equal(base + change, naive_counts(self.now["ema"]))

    @invariant()
    def snapshots_are_listed(self):
        if getattr(self, "session", None) is not None:
            assert {e.name for e in self.store.snapshots()} == set(self.kept)

    def teardown(self):
        if getattr(self, "session", None) is None:
            return
        self.session.close()
        for name, state in self.kept.items():
            reader = self.store.reader(name, INITIALS)
            for field, shards in state.items():
                for shard, rows in enumerate(shards):
                    np.testing.assert_array_equal(reader.read_shard(field, shard), rows)
        shutil.rmtree(self.folder)


_SETTINGS = {"stateful_step_count": 40, "deadline": None, "suppress_health_check": list(HealthCheck)}


def test_random_operations():
    """60 random programs of about 40 operations."""
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=60, **_SETTINGS))


@pytest.mark.long
def test_many_random_operations():
    """1500 random programs."""
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=1500, **_SETTINGS))
