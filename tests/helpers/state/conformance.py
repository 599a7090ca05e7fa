"""The contract of a state backend as tests: every backend's test class inherits these."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.basics.fence import LostLaunch
from tests.helpers.state.samples import (
    BY_NAME,
    COUNTS,
    FIELDS,
    INITIALS,
    assert_same,
    copied,
    excluded,
    initial_state,
    naive_counts,
    random_stored,
)

SEED = 5


class Conformance:
    """A subclass gives `make()`: an empty store of FIELDS over COUNTS with seed SEED."""

    budget = 5_000  # three shards: epochs must evict and read again

    @pytest.fixture
    def store(self, tmp_path):
        self.folder = tmp_path
        return self.make()

    def make(self):
        raise NotImplementedError

    def open(self, store, **options):
        launch = options.pop("launch", None) or store.begin_launch()
        options.setdefault("initials", INITIALS)
        return store.session(launch, budget=self.budget, **options)

    @staticmethod
    def train(session, state, epoch, order=None, seed=0, snapshot_at=None):
        """An epoch over two open shards at a time: random rows of both in one batch, mirrored in the dict model."""
        rng = np.random.default_rng([seed, epoch])
        order = list(rng.permutation(len(COUNTS))) if order is None else order
        session.begin(order, epoch)
        for place, shard in enumerate(order):
            session.lease(shard)
            both = order[max(0, place - 1) : place + 1]
            pairs = [(s, r) for s in both for r in range(COUNTS[s])]
            picked = [pairs[i] for i in rng.permutation(len(pairs))[: rng.integers(1, len(pairs) + 1)]]
            shards, rows = np.array([p[0] for p in picked]), np.array([p[1] for p in picked])
            batch = session.at(shards, rows)
            for field in FIELDS:
                if rng.random() < 0.7:
                    stored = random_stored(rng, field, len(rows))
                    batch.scatter(field.name, stored)
                    for s, r, value in zip(shards, rows, stored, strict=True):
                        state[field.name][s][r] = value
                expected = np.stack([state[field.name][s][r] for s, r in picked])
                np.testing.assert_array_equal(session.gather(field.name, shards, rows), expected)
            if place:
                session.release(order[place - 1])
            if place == snapshot_at:
                session.snapshot("middle")
        if order:
            session.release(order[-1])
        session.finish()

    def test_initial_values(self, store):
        """Rows that were never written read as their constant, drawn or given initial values."""
        with self.open(store) as session:
            assert_same(session, initial_state(SEED))
            session.lease(3)
            batch = session.at(np.array([3, 3]), np.array([0, 6]))
            np.testing.assert_array_equal(batch.read("step"), [0, 0])
            np.testing.assert_array_equal(batch.read("ids"), np.full((2, 3), -1))
            assert batch.read("seen").dtype == np.bool_
            assert not batch.read("seen").any()
            np.testing.assert_allclose(batch.read("heat"), 0.5, atol=1 / 255)
            phi = batch.read("phi")
            assert phi.dtype == np.float32
            assert (np.abs(phi) <= 1).all()
            assert len(np.unique(phi)) > 10
            session.release(3)

    def test_given_initial_needs_its_function(self, store):
        """A field that starts from labels is refused without the function, by name."""
        with pytest.raises(UserError, match=r"ema.*initials"), self.open(store, initials={}) as session:
            session.lease(0)

    def test_epochs_equal_the_dict_model(self, store):
        """Five epochs with evictions leave exactly what a dict of arrays holds."""
        state = initial_state(SEED)
        with self.open(store) as session:
            for epoch in range(5):
                self.train(session, state, epoch)
                assert_same(session, state)

    def test_floats_round_trip(self, store):
        """Writing floats and reading them back is within half a code, and booleans are exact."""
        rng = np.random.default_rng(0)
        with self.open(store) as session:
            session.begin([0], 0)
            session.lease(0)
            batch = session.at(np.zeros(12, int), np.arange(12))
            heat, seen = rng.random((12, 3, 4, 4), np.float32), rng.random((12, 11)) < 0.5
            batch.write("heat", heat)
            batch.write("seen", seen)
            assert np.abs(batch.read("heat") - heat).max() <= 0.5 / 255 + 1e-6
            np.testing.assert_array_equal(batch.read("seen"), seen)
            session.release(0)

    def test_stochastic_rounding_replays(self, store):
        """The same write in the same epoch gives the same codes, in another epoch others; both within one code."""
        values = np.random.default_rng(1).random((9, 8), np.float32)
        codes = []
        with self.open(store) as session:
            for epoch in (3, 3, 4):
                session.begin([1], epoch)
                session.lease(1)
                batch = session.at(np.ones(9, int), np.arange(9))
                batch.write("ema", values)
                codes.append(batch.gather("ema"))
                session.release(1)
                session.finish()
        np.testing.assert_array_equal(codes[0], codes[1])
        assert (codes[0] != codes[2]).any()
        assert np.abs(BY_NAME["ema"].decode(codes[2]) - values).max() < 1 / 255

    def test_snapshots_are_immutable_and_restore(self, store):
        """Training goes on after a snapshot without changing it; restoring brings back every bit."""
        state = initial_state(SEED)
        kept = {}
        with self.open(store) as session:
            for epoch in range(3):
                self.train(session, state, epoch)
                entry = session.snapshot(f"epoch-{epoch}", {"epoch": epoch})
                assert (entry.name, entry.meta) == (f"epoch-{epoch}", {"epoch": epoch})
                kept[entry.name] = copied(state)
            self.train(session, state, 9)
            assert [e.name for e in store.snapshots()] == list(kept)
            for name in ("epoch-0", "epoch-2", "epoch-1"):
                session.restore(name)
                assert_same(session, kept[name])
            self.train(session, kept["epoch-1"], 5)
            session.restore(None)
            assert_same(session, initial_state(SEED))
        with self.open(store, snapshot="epoch-2") as session:
            assert_same(session, kept["epoch-2"])

    def test_snapshot_in_the_middle_of_an_epoch(self, store):
        """A snapshot spills leased shards as they are at that step; the leases go on."""
        state, middle = initial_state(SEED), {}

        class Recorder:
            """Notes the model's state at the moment of the snapshot."""

            def __init__(self, session):
                self._session = session

            def __getattr__(self, name):
                if name == "snapshot":
                    middle.update(copied(state))
                return getattr(self._session, name)

        with self.open(store) as session:
            self.train(session, state, 0)
            self.train(Recorder(session), state, 1, snapshot_at=3)
            assert_same(session, state)
            session.restore("middle")
            assert_same(session, middle)

    def test_training_may_go_on_before_the_commit(self, store):
        """What is written after prepare() does not reach the snapshot, nor harm it; the next one has it."""
        state = initial_state(SEED)
        with self.open(store) as session:
            self.train(session, state, 0)
            deltas, then = [session.prepare()], copied(state)
            self.train(session, state, 1)
            session.commit("then", deltas)
            session.adopt(deltas)
            assert_same(session, state)
            np.testing.assert_array_equal(sum(session.histogram("ema")), naive_counts(state["ema"]))
            session.snapshot("now")
            session.restore("then")
            assert_same(session, then)
            session.restore("now")
            assert_same(session, state)
            session.collect(["then", "now"])
        with self.open(store, snapshot="then") as session:
            assert_same(session, then)

    def test_deleting_snapshots(self, store):
        """collect keeps the named ones whole; the session's own state survives the deletion of its base."""
        state, kept = initial_state(SEED), {}
        with self.open(store) as session:
            for epoch in range(4):
                self.train(session, state, epoch)
                session.snapshot(f"e{epoch}")
                kept[f"e{epoch}"] = copied(state)
            session.collect(["e1", "e3"])
            assert [e.name for e in store.snapshots()] == ["e1", "e3"]
            session.delete_snapshot("e3")
            assert_same(session, state)
            self.train(session, state, 7)
            session.snapshot("e7")
            assert_same(session, state)
            session.restore("e1")
            assert_same(session, kept["e1"])
            with pytest.raises(UserError, match=r"no snapshot 'e3'.*e1.*e7"):
                session.restore("e3")

    def test_snapshot_names(self, store):
        """A name is used once per launch; a new launch may make it again, and the newer one counts."""
        state = initial_state(SEED)
        with self.open(store) as session:
            session.snapshot("a")
            with pytest.raises(UserError, match="immutable"):
                session.snapshot("a")
        with self.open(store, snapshot="a") as session:
            self.train(session, state, 0)
            session.snapshot("a")
        with self.open(store, snapshot="a") as session:
            assert_same(session, state)
            assert [e.name for e in store.snapshots()] == ["a"]

    def test_a_lost_launch_cannot_publish(self, store):
        """After a new launch has begun, the old one can neither commit nor delete."""
        old = self.open(store)
        old.snapshot("mine")
        new = self.open(store, snapshot="mine")
        with pytest.raises(LostLaunch, match=r"launch 2.*launch 1"):
            old.snapshot("late")
        with pytest.raises(LostLaunch):
            old.collect([])
        with pytest.raises(LostLaunch):
            store.session(1, budget=self.budget, initials=INITIALS)
        assert [e.name for e in store.snapshots()] == ["mine"]
        old.close()
        new.snapshot("next")
        new.close()

    def test_histograms_follow_the_rows(self, store):
        """Counts kept in the background equal a full count, with excluded entries, mid-epoch and after."""
        state, outside = initial_state(SEED), {"ema": excluded}
        with self.open(store, excluded=outside) as session:
            for epoch in range(3):
                self.train(session, state, epoch, snapshot_at=2 if epoch == 2 else None)
                base, change = session.histogram("ema")
                np.testing.assert_array_equal(base + change, naive_counts(state["ema"], excluded))
                session.adopt([session.prepare(durable=False)])
                assert not session.histogram("ema")[1].any()
            session.snapshot("end")
            with pytest.raises(UserError, match="keeps no histogram"):
                session.histogram("phi")
        with self.open(store, excluded=outside, snapshot="end") as session:
            np.testing.assert_array_equal(session.histogram("ema")[0], naive_counts(state["ema"], excluded))
            session.restore("middle")
            expected = [session.read_shard("ema", s) for s in range(len(COUNTS))]
            np.testing.assert_array_equal(session.histogram("ema")[0], naive_counts(expected, excluded))

    def test_misuse_is_refused_by_name(self, store):
        """Every wrong call says what was found and what to do."""
        with self.open(store) as session:
            session.lease(0)
            one, two = np.array([0]), np.array([2])
            for call, message in [
                (lambda: session.lease(0), "leased already"),
                (lambda: session.lease(6), r"shard 6.*0\.\.5"),
                (lambda: session.release(1), "not leased"),
                (lambda: session.gather("phi", np.array([1]), one), "shard 1 is not leased"),
                (lambda: session.gather("phi", np.array([7]), one), r"shard 7.*0\.\.5"),
                (lambda: session.gather("phi", one, np.array([12])), r"row 12 of shard 0.*0\.\.11"),
                (lambda: session.gather("psi", one, two), "no field 'psi'.*ema"),
                (lambda: session.scatter("phi", one, two, np.zeros((1, 8))), "float64.*float16.*write"),
                (lambda: session.scatter("phi", one, two, np.zeros((1, 7), np.float16)), "float16"),
                (lambda: session.at(one, two).write("ema", np.full((1, 8), np.nan)), "NaN"),
                (lambda: session.at(one, two).write("ema", np.zeros((1, 9))), "shape"),
                (lambda: session.begin([1, 1], 0), "twice"),
                (lambda: session.finish(), r"\[0\] are still leased"),
                (lambda: session.read_shard("phi", 0), "leased"),
                (lambda: session.restore("nothing"), "still leased"),
            ]:
                with pytest.raises(UserError, match=message):
                    call()
            session.release(0)
        with pytest.raises(UserError, match="closed"):
            session.lease(1)

    def test_two_ranks_exchange_and_commit(self, store):
        """Two ranks train disjoint shards, swap them in the next epoch, and one commit holds both ranks' rows."""
        state, launch = initial_state(SEED), store.begin_launch()
        ranks = [self.open(store, launch=launch, rank=r, world=2) for r in range(2)]
        halves = ([0, 2, 4], [1, 3, 5])
        for epoch in range(3):
            for rank, order in zip(ranks, halves if epoch % 2 else halves[::-1], strict=True):
                self.train(rank, state, epoch, order=order)
            deltas = [rank.prepare(durable=epoch == 2) for rank in ranks]
            if epoch == 2:
                ranks[0].commit("both", deltas)
            else:
                with pytest.raises(UserError, match="durable"):
                    ranks[0].commit("both", deltas)
            for rank in ranks:
                rank.adopt(deltas)
                assert_same(rank, state)
        for rank in ranks:
            rank.close()
        with self.open(store, snapshot="both") as session:
            assert_same(session, state)
            np.testing.assert_array_equal(session.histogram("ema")[0], naive_counts(state["ema"]))

    def test_two_ranks_cannot_hold_one_shard(self, store):
        """A shard that another rank holds, a rank opened twice, and a skipped exchange are errors, not lost updates."""
        launch = store.begin_launch()
        a, b = (self.open(store, launch=launch, rank=r, world=2) for r in range(2))
        a.begin([0, 1], 0)
        with pytest.raises(UserError, match="shard 1 is held by rank 0"):
            b.begin([1, 5], 0)
        a.lease(5)  # a refused rank holds nothing
        a.release(5)
        b.begin([2, 3], 0)
        with pytest.raises(UserError, match="shard 0 is held by rank 0"):
            b.lease(0)
        with pytest.raises(UserError, match="already has a session"):
            self.open(store, launch=launch, rank=1, world=2)
        b.lease(3)
        b.release(3)
        a.finish()
        b.finish()
        with pytest.raises(UserError, match="without adopt"):
            b.begin([0], 1)
        with pytest.raises(UserError, match="ranks \\[0\\]"):
            a.commit("half", [a.prepare()])
        a.adopt([a.prepare(), b.prepare()])
        a.close()
        b.close()
