"""Fully labelled images that learn beside the epoch's own samples (train.fully_labelled_weight).

Every step takes some of data.fully_labelled in addition to its batch; the loss gains weight × the mean of the method's
`complete_loss` over them. They have no state, and the main stream does not know of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.repeated import RepeatedOrder, RepeatedStream
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.checkpoints.checkpoint import Position
from lacuna.trainer.config.sections import Config
from lacuna.trainer.on_device.decoding import device_decoder
from lacuna.trainer.training_data import training_maker

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run

log = logging.getLogger("lacuna")
_SEED = 7  # keeps this use of the run's seed apart
_PART = 4  # one fully labelled image per so many of the phase's batch


@dataclass(frozen=True)
class Further:
    """This rank's further samples of one step."""

    batch: Batch
    samples: int  # of all ranks
    weight: float

    def narrow(self, piece: int, pieces: int) -> Further:
        """Of one micro-batch."""
        first, last = (len(self.batch) * p // pieces for p in (piece, piece + 1))
        return Further(self.batch.narrow(first, last), self.samples, self.weight)

    def share(self, per_sample: torch.Tensor) -> torch.Tensor:
        """This rank's part of what they add to the global loss."""
        return self.weight * per_sample.sum() / self.samples


class FullyLabelled:
    """Of one phase."""

    def __init__(self, run: Run, phase: int):
        self.run, self.phase, self.weight = run, phase, run.config.train.fully_labelled_weight
        self.source = run.sources["fully_labelled"]
        samples = int(self.source.counts.sum())
        self.batch = min(samples, max(1, run.config.phases[phase].batch // _PART))
        self.stream: RepeatedStream | None = None
        self._said: set[tuple[str, int]] = set()  # corrupt ones that were named

    @contextlib.contextmanager
    def epoch(self, position: Position) -> Iterator[None]:
        """From the position's step on; every epoch begins its own passes."""
        run, world = self.run, self.run.world
        seed = mix(run.config.seed, self.phase, _SEED, position.epoch)
        order = RepeatedOrder(int(self.source.counts.sum()), self.batch, seed)
        data = run.config.data
        decoder = device_decoder(data, world.device)
        with RepeatedStream(self.source, order,
                            lambda number: training_maker(run.config, self.source, seed, number, decoder=decoder),
                            rank=world.rank, world=world.size, start_step=position.step, workers=data.workers,
                            prefetch=data.prefetch, pin=world.device.type == "cuda") as self.stream:
            yield

    def take(self) -> Further | None:
        """A collective: the ranks agree on how many there are."""
        assert self.stream is not None, "taken outside an epoch"
        batch = next(self.stream)
        for bad in batch.bad:
            if (bad.shard, bad.row) not in self._said:
                self._said.add((bad.shard, bad.row))
                log.warning("data.fully_labelled: %r in %s cannot be decoded (%s) and is left out", bad.key, bad.shard,
                            bad.reason)
        return Further(batch, max(1, int(self.run.world.sum_counts(len(batch))[0])), self.weight)


class NoneFullyLabelled:
    """A run whose loss knows its own samples only."""

    def epoch(self, position: Position) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def take(self) -> Further | None:
        return None


def fully_labelled(run: Run, phase: int) -> FullyLabelled | NoneFullyLabelled:
    return FullyLabelled(run, phase) if run.config.train.fully_labelled_weight else NoneFullyLabelled()


def check_fully_labelled(config: Config, sources: dict[str, ShardSource]) -> None:
    """Refuse a weight without images, and images that the best epoch is chosen on."""
    weight = config.train.fully_labelled_weight
    if not weight:
        return
    if "fully_labelled" not in sources:
        raise UserError(f"train.fully_labelled_weight = {weight} needs images whose labels are complete: give "
                        "data.fully_labelled (url, labels, subset), or set the weight to 0.")
    for name in ("val", "test"):
        if name in sources and (shared := _shared_rows(sources["fully_labelled"], sources[name])):
            raise UserError(f"data.fully_labelled shares {shared} images with data.{name}, but train."
                            f"fully_labelled_weight = {weight} lets them learn, so the score on data.{name} would say "
                            "too much. Name other rows: `lacuna annotate --scheme val_split` makes subsets.")


def _shared_rows(one: ShardSource, two: ShardSource) -> int:
    if one.index.fingerprint != two.index.fingerprint:
        return 0
    if one.subset is None or two.subset is None:
        return int((one if two.subset is None else two).counts.sum())
    return sum(int((one.subset.mask(shard) & two.subset.mask(shard)).sum()) for shard in range(len(one.counts)))
