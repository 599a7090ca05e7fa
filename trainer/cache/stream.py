"""Batches of what the fixed part made of samples: read where it is known, else computed, rounded, kept and then used.

A sample's numbers do not depend on the batch that it came in, nor on the ranks: the fixed part always sees pieces of
one size, padded if need be, because libraries choose other kernels for other sizes. So a run that fills a cache, one
that finds it full and one that was killed in between train on the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.decode import DecodeError
from lacuna.data_pipelines.pending_batches import bad_sample
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.stream import EpochStream
from lacuna.state_store.derived import ROWS, DerivedRows, filled_rows
from lacuna.trainer.cache.views import View
from lacuna.trainer.config.sections import Config
from lacuna.trainer.evaluate import autocast, model_inputs
from lacuna.trainer.leased_shards import LeasedShards
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.world import World

_PIECE_ON_CPU, _PIECE_ON_DEVICE = 16, 64


class CachedStream:
    """Like the EpochStream that it takes what is missing from; what it fills is kept when it is closed."""

    def __init__(self, view: View, model: Classifier, config: Config, world: World, plan: EpochPlan,
                 start_step: int = 0):
        self.view, self.model, self.config, self.world, self.closed = view, model, config, world, False
        streams = plan.rank_streams(world.rank, world.size)
        if world.main:
            view.note()
        counts = view.source.index.counts
        self.rows = DerivedRows(view.url, view.schema, int(config.train.state_budget_mb * 2**20))
        try:
            self.held = LeasedShards(self.rows, plan, streams, start_step, "what the phase caches")
            self.rows.begin(self.held.order)
        except BaseException:
            self.rows.close(whole=False)
            raise
        self.stream = EpochStream(view.source, plan, streams, view.maker, start_step=start_step,
                                  workers=config.data.workers, prefetch=config.data.prefetch,
                                  pin=world.device.type == "cuda",
                                  known=lambda shard: filled_rows(view.url, shard, int(counts[shard])))

    def __enter__(self) -> CachedStream:
        return self

    def __exit__(self, kind, *_: object) -> None:
        self.closed = True
        self.stream.close()
        self.rows.close(whole=kind is None)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.stream:
            self.held.take(batch.planned)
            filled = self._filled(batch)
            self.held.give(batch.planned)
            yield filled

    def spill(self) -> None:
        """Keep what was filled so far."""
        self.rows.spill()

    def _filled(self, batch: Batch) -> Batch:
        stored = self.rows.at(batch.shards, batch.rows).gather(ROWS)
        samples = stored.view(self.view.row)[:, 0]
        missing = np.flatnonzero(samples["filled"] != 1)
        assert batch.decoded is not None
        late = missing[~batch.decoded[missing]]
        if len(late):
            return self._filled(self._decoded(batch, late))
        if len(missing):
            samples["kept"][missing] = self._kept(batch.inputs[missing])
            if batch.strong is not None:
                samples["strong"][missing] = self._kept(batch.strong[missing])
            samples["box"][missing], samples["flip"][missing] = batch.boxes[missing], batch.flips[missing]
            samples["filled"][missing] = 1
            self.rows.at(batch.shards[missing], batch.rows[missing]).scatter(ROWS, stored[missing])
        return Batch(self._tensor(samples["kept"]), batch.labels, batch.shards, batch.rows,
                     torch.from_numpy(samples["box"].copy()), torch.from_numpy(samples["flip"] == 1), batch.planned,
                     batch.bad, self._tensor(samples["strong"]) if batch.strong is not None else None)

    def _tensor(self, halves: np.ndarray) -> torch.Tensor:
        """On its way to an accelerator from pinned memory: the host need not wait for it there."""
        if not self.stream.pin:
            return torch.from_numpy(halves)
        return torch.empty(halves.shape, dtype=torch.float16, pin_memory=True).copy_(torch.from_numpy(halves))

    def _decoded(self, batch: Batch, places: np.ndarray) -> Batch:
        """With images that were thought to be known: their shard was damaged, or replaced by one with fewer rows."""
        views = self.view.maker.empty(len(batch), False)
        made = np.zeros(len(batch), bool) if batch.decoded is None else batch.decoded.copy()
        if made.any():
            views[0] = batch.inputs
            if batch.strong is not None:
                views[1] = batch.strong
        bad, opened = [], {shard: self.view.source.open(shard) for shard in np.unique(batch.shards[places]).tolist()}
        for place in places.tolist():
            shard, row = int(batch.shards[place]), int(batch.rows[place])
            try:
                box, flip = self.view.maker(opened[shard].read(row), shard, row, views[:, place])
            except DecodeError as error:
                bad.append((place, bad_sample(opened[shard], row, error)))
                continue
            batch.boxes[place], batch.flips[place], made[place] = torch.tensor(box), flip, True
        whole = Batch(views[0], batch.labels, batch.shards, batch.rows, batch.boxes, batch.flips, batch.planned,
                      batch.bad, views[1] if len(views) > 1 else None, decoded=made)
        return whole.without(bad) if bad else whole

    def _kept(self, images: torch.Tensor) -> np.ndarray:
        """float16 [n, …]"""
        return kept(self.model, images, self.config, self.world, f"{self.view.facts['cut']} of this backbone")


def kept(model: Classifier, images: torch.Tensor, config: Config, world: World, what: str) -> np.ndarray:
    """What the fixed part makes of uint8 images, float16 [n, …]."""
    size = _PIECE_ON_CPU if world.device.type == "cpu" else _PIECE_ON_DEVICE
    found = []
    for piece in images.split(size):
        padded = torch.cat([piece, piece.new_zeros((size - len(piece), *piece.shape[1:]))])
        with autocast(config, world):
            found.append(model.before_cut(model_inputs(padded, config, world))[: len(piece)].half().cpu())
    half = torch.cat(found).numpy()
    if not np.isfinite(half).all():
        raise UserError(f"phases: {what} go beyond what half precision holds (65,504), so they cannot be cached. Leave "
                        "the phase's cache out, or use another backbone.")
    return half
