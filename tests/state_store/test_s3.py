"""Proves the store on an S3 server: same contract, kills, authentication, and injected failures without silent loss."""

from __future__ import annotations

import uuid

import pytest

from lacuna import state_store
from lacuna.basics import retries, storage
from lacuna.state_store.verify import verify
from lacuna.tools import doctor
from tests.helpers.state.conformance import SEED, Conformance
from tests.helpers.state.crashes import finish_cleanly, kill_at, last_committed, launch
from tests.helpers.state.samples import COUNTS, FIELDS, INITIALS, assert_same, initial_state

KILLS = ["prepare.synced:2", "commit.entry:1", "collect.some_removed:1", "orphans.some_removed:1"]


@pytest.fixture
def url(s3) -> str:
    return f"s3://bucket/{uuid.uuid4().hex}"


def run_through(proxy, url: str, faults: dict[str, float], epochs: int) -> None:
    """Epochs and snapshots while requests fail; then, without faults, everything is there."""
    state = initial_state(SEED)
    proxy.faults = faults
    store = state_store.create(url, COUNTS, "index-1", FIELDS, SEED)
    with store.session(store.begin_launch(), budget=5_000, initials=INITIALS) as session:
        for epoch in range(epochs):
            Conformance.train(session, state, epoch)
            session.snapshot(f"e{epoch}")
            session.collect([f"e{epoch}"])
    proxy.faults = {}
    last = f"e{epochs - 1}"
    again = state_store.open(url, COUNTS, "index-1", FIELDS, SEED)
    assert [e.name for e in again.snapshots()] == [last]
    assert verify(again).problems == []
    with again.session(again.begin_launch(), budget=5_000, initials=INITIALS, snapshot=last) as session:
        assert_same(session, state)
    assert again.orphans() == []


def test_failing_requests_are_retried(s3, url):
    """Server errors, throttling, slow answers, cut bodies and lost answers: retried, and no row is wrong."""
    run_through(s3, url, {"500": 0.04, "503": 0.05, "slow": 0.03, "truncate": 0.08, "lost": 0.04}, epochs=2)
    assert len(s3.counts) == 5
    assert sum(s3.counts.values()) >= 15


@pytest.mark.long
@pytest.mark.parametrize("faults", [
    {"500": 0.08}, {"503": 0.15}, {"slow": 0.1}, {"truncate": 0.15}, {"lost": 0.08},
], ids=lambda f: next(iter(f)))
def test_each_kind_of_failure(s3, url, faults):
    """Each kind alone, often."""
    run_through(s3, url, faults, epochs=3)
    assert s3.counts[next(iter(faults))] >= 5


def test_kills_on_s3(s3, url):
    """A launch killed half-way through a chunk, then one killed between manifest and commit; the next cleans up."""
    assert kill_at(url, "chunk.half_written:5", steps=1)
    assert kill_at(url, "commit.manifest:2", steps=2)
    finish_cleanly(url, last_committed(url))


@pytest.mark.long
@pytest.mark.parametrize("fault", KILLS)
def test_more_kills_on_s3(s3, url, fault):
    """A killed launch leaves the last snapshot whole; the next one goes on and cleans up."""
    assert launch(url, 2).wait(120) == 0
    if fault.startswith("orphans"):
        assert kill_at(url, "chunk.written:9")
    assert kill_at(url, fault)
    finish_cleanly(url, last_committed(url))


def test_wrong_credentials_are_refused_at_once(s3, url, monkeypatch):
    """Authentication is on: a wrong secret is an error, not a retry loop."""
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(PermissionError):
        state_store.create(url, COUNTS, "index-1", FIELDS, SEED)
    assert s3.requests < 10


@pytest.mark.long
def test_a_dead_server_ends_the_run_with_an_error(s3, url, monkeypatch):
    """When every request fails, the retries end and the session says so instead of going on."""
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    store = state_store.create(url, COUNTS, "index-1", FIELDS, SEED)
    with store.session(store.begin_launch(), budget=5_000, initials=INITIALS) as session:
        Conformance.train(session, initial_state(SEED), 0)
        session.snapshot("kept")
        s3.faults = {"500": 1.0}
        with pytest.raises(Exception, match=r"injected|Internal|SlowDown"):
            Conformance.train(session, initial_state(SEED), 1)
        s3.faults = {}
    assert [e.name for e in state_store.open(url).snapshots()] == ["kept"]


@pytest.mark.long
class TestS3(Conformance):
    """The whole contract on S3."""

    @pytest.fixture
    def store(self, s3, url):
        return state_store.create(url, COUNTS, "index-1", FIELDS, SEED)


def test_the_doctor_reaches_it(s3, url):
    """Conditional create, read and delete work on this server, and `lacuna doctor` says so; without a bucket it is a
    problem."""
    assert [finding.level for finding in doctor.object_storage(url)] == [doctor.OK]
    assert storage.list_names(url) == []
    assert [finding.level for finding in doctor.object_storage("s3://no-such-bucket/x")] == [doctor.PROBLEM]
