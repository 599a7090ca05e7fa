"""One method's run with the real loop: a few steps of an epoch, its end, and an epoch that is measured."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from lacuna.trainer import world as worlds
from lacuna.trainer.assemble import build_run
from lacuna.trainer.checkpoints.checkpoint import Position
from lacuna.trainer.config.sections import Config
from lacuna.trainer.loop import train_epoch
from lacuna.trainer.phase import Phase
from lacuna.trainer.whole_run import Run, open_state

_FIRST = 5  # steps of the epoch before: EN has cut-offs only after one


@dataclass(frozen=True)
class Found:
    utilisation: float
    facts: dict[str, float]


class Meter(Protocol):
    def around(self) -> AbstractContextManager: ...

    def attach(self, phase: Phase, first: int, last: int) -> None:
        """Watch the optimizer steps `first` to `last`, counted over the phase."""

    def found(self, first: int, last: int) -> Found: ...


def measured(config: Config, world: worlds.World, watchdog: worlds.Watchdog, meter: Meter, warm_up: int, steps: int,
             item: bool) -> Found:
    first = _FIRST + warm_up
    with meter.around():
        run = build_run(config, world, watchdog)
        run.checkpoints.begin_launch()
        run.run_log.rewind(0, run.checkpoints.hold)
        open_state(run, None)
        if item:
            _read_back(run)
        phase = Phase(run, 0, None)
        meter.attach(phase, first, first + steps)
        start = Position(step=phase.plans[0].steps - _FIRST)
        for epoch, position in enumerate((start, Position(epoch=1))):
            run.method.begin_epoch(phase.epoch_start(epoch))
            phase.sums.begin_epoch()
            train_epoch(phase, position)
            run.state.end_epoch()
        phase.close()
        run.state.close()
        run.run_log.close()
    return meter.found(first - 1, first + steps - 1)


def _read_back(run: Run) -> None:
    """Make the method read one value in every step, as a careless one would."""
    loss = run.method.loss

    def with_item(outputs, batch, step):
        terms = loss(outputs, batch, step)
        terms.per_sample.sum().item()
        return terms

    run.method.loss = with_item  # type: ignore[method-assign]
