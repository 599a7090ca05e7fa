"""Proves that several real processes on one store lose no update, whoever owns a shard in which epoch."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.basics.fence import newest_launch
from lacuna.state_store import Field

COUNTS = [30, 25, 30, 28, 30, 30, 11, 30, 30]
FIELDS = [Field("visits", (), "int32"), Field("sums", (6,), "float32"),
          Field("ema", (6,), "uint8", range=(0, 1), stochastic=True, histogram=True)]


def train(session, order: list[int], epoch: int) -> None:
    """Every row is visited once: a counter goes up, a sum gets a number that depends on sample and epoch."""
    session.begin(order, epoch)
    for shard in order:
        session.lease(shard)
        batch = session.at(np.full(COUNTS[shard], shard), np.arange(COUNTS[shard]))
        batch.scatter("visits", batch.gather("visits") + np.int32(1))
        batch.write("sums", batch.read("sums") + np.float32(shard + epoch))
        batch.write("ema", 0.9 * batch.read("ema") + 0.1 * ((shard + epoch) % 3) / 2)
        session.release(shard)
    session.finish()


def rank_process(url: str, launch: int, rank: int, world: int, pipe) -> None:
    """One rank: obeys (order, epoch) messages, exchanges deltas through the parent, rank 0 commits."""
    store = state_store.open(url)
    with store.session(launch, rank, world, budget=20_000) as session:
        while (message := pipe.recv()) is not None:
            order, epoch, name = message
            try:
                train(session, order, epoch)
            except UserError as error:
                pipe.send(error)
                continue
            pipe.send(session.prepare(durable=name is not None))
            deltas = pipe.recv()
            if name is not None and rank == 0:
                session.commit(name, deltas, {"epoch": epoch})
            pipe.send("committed")
            pipe.recv()
            session.adopt(deltas)


class Ranks:
    """Starts rank processes and plays the trainer's network."""

    def __init__(self, url: str, world: int):
        context = multiprocessing.get_context("spawn")
        launch = state_store.open(url).begin_launch()
        pairs = [context.Pipe() for _ in range(world)]
        self.pipes = [mine for mine, _ in pairs]
        self.processes = [context.Process(target=rank_process, args=(url, launch, rank, world, pairs[rank][1]))
                          for rank in range(world)]
        for process in self.processes:
            process.start()

    def epoch(self, orders: list[list[int]], epoch: int, name: str | None) -> None:
        for pipe, order in zip(self.pipes, orders, strict=True):
            pipe.send((order, epoch, name))
        deltas = [pipe.recv() for pipe in self.pipes]
        for reply in (deltas, None):
            for pipe in self.pipes:
                pipe.send(reply)
            if reply is not None:
                assert [pipe.recv() for pipe in self.pipes] == ["committed"] * len(self.pipes)

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(120)
            assert process.exitcode == 0


def single_process(url: str, epochs: int) -> state_store.StateStore:
    store = state_store.create(url, COUNTS, "i", FIELDS, 1)
    with store.session(store.begin_launch(), budget=10**6) as session:
        for epoch in range(epochs):
            train(session, list(range(len(COUNTS))), epoch)
        session.snapshot("end")
    return store


@pytest.mark.parametrize("world", [2, 4])
def test_no_update_is_lost(tmp_path, world):
    """Four epochs with shards changing owners equal one process bit for bit, stochastic rounding included."""
    url, rng = str(tmp_path / "state"), np.random.default_rng(world)
    store = state_store.create(url, COUNTS, "i", FIELDS, 1)
    ranks = Ranks(url, world)
    for epoch in range(4):
        dealt = rng.permutation(len(COUNTS)).tolist()
        ranks.epoch([dealt[rank::world] for rank in range(world)], epoch, "end" if epoch == 3 else None)
    ranks.stop()
    alone = single_process(str(tmp_path / "alone"), 4).reader("end")
    together = store.reader("end")
    for shard in range(len(COUNTS)):
        assert (together.read_shard("visits", shard) == 4).all()
        for field in FIELDS:
            np.testing.assert_array_equal(together.read_shard(field.name, shard), alone.read_shard(field.name, shard))
    store.begin_launch()
    assert store.orphans() == []


def test_two_processes_cannot_lease_one_shard(tmp_path):
    """When two live ranks are dealt one shard, at least one is refused before it writes."""
    url = str(tmp_path / "state")
    state_store.create(url, COUNTS, "i", FIELDS, 1)
    ranks = Ranks(url, 2)
    ranks.pipes[0].send(([0, 1, 2], 0, None))
    assert isinstance(ranks.pipes[0].recv(), state_store.Delta)
    other = state_store.open(url)
    with pytest.raises(UserError, match="already has a session"):
        other.session(newest_launch(other.fence.entries()), 0, 2, budget=20_000)
    for process in ranks.processes:
        process.kill()
        process.join()
    launch = other.begin_launch()  # the killed ranks' claims do not stand in the way
    sessions = [other.session(launch, rank, 2, budget=20_000) for rank in range(2)]
    sessions[0].begin([0, 1, 2], 0)
    sessions[0].lease(2)
    with pytest.raises(UserError, match="shard 2 is held by rank 0"):
        sessions[1].lease(2)
    for session in sessions:
        session.close()
