"""A small store with written and never-written shards, beside a dict model of it."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna import state_store
from tests.helpers.state.samples import COUNTS, FIELDS, INITIALS, SEED, initial_state, random_stored


@pytest.fixture
def filled(tmp_path):
    """A store with snapshot "end" in which shards 0..3 are written, and the dict model of it."""
    rng, state = np.random.default_rng(0), initial_state(SEED)
    store = state_store.create(str(tmp_path / "state"), COUNTS, "index", FIELDS, SEED)
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS) as session:
        for shard in range(4):
            session.lease(shard)
            for field in FIELDS:
                stored = random_stored(rng, field, COUNTS[shard])
                if field.dtype == "bits":
                    stored = field.encode(field.decode(stored))  # padding bits are zero
                session.scatter(field.name, np.full(len(stored), shard), np.arange(len(stored)), stored)
                state[field.name][shard][:] = stored
            session.release(shard)
        session.finish()
        session.snapshot("end", {"step": 7})
    return store, state
