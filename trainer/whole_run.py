"""A run from start to end: resume, every phase, hand-over of the best epoch, final test."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.chunks import DamagedChunk
from lacuna.trainer import held_out
from lacuna.trainer.cache.phase_cache import NoCache, Streams, cut_of, open_cache
from lacuna.trainer.checkpoints.checkpoint import Checkpoint, Checkpoints, Position, load_method_state
from lacuna.trainer.checkpoints.extending import check_epochs
from lacuna.trainer.config.sections import Config
from lacuna.trainer.evaluate import describe, evaluate
from lacuna.trainer.head_start import measure_head_norm
from lacuna.trainer.methods.base import Method
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.opening import opening
from lacuna.trainer.phase import Phase
from lacuna.trainer.run_log import RunLog
from lacuna.trainer.sample_state import NoState, SampleState
from lacuna.trainer.training_data import phase_steps
from lacuna.trainer.world import Watchdog, World

log = logging.getLogger("lacuna")


class Stop:
    """Set by SIGTERM or Ctrl-C: the step is finished, a checkpoint written, and training ends as asked."""

    def __init__(self):
        self.asked = False  # on this rank, at any moment
        self.agreed = False  # on all ranks, at the same step: only this may change what a rank does next
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        """Listen to the signals; Python lets only the main thread do so."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask(self, number, frame) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice at the keyboard: now
        self.asked = True


@dataclass
class Run:
    """What the phases of a run share."""

    config: Config
    world: World
    sources: dict[str, ShardSource]  # train, and val and test if given
    model: Classifier
    method: Method
    run_log: RunLog
    checkpoints: Checkpoints
    watchdog: Watchdog
    stop: Stop
    state: SampleState | NoState = field(default_factory=NoState)  # what the method remembers about every sample
    cache: Streams = field(init=False)  # where the batches of a phase come from

    def __post_init__(self) -> None:
        self.cache = NoCache(self)

    @functools.cached_property
    def steps(self) -> list[int]:
        """Of every phase, to within a few."""
        return phase_steps(self.config, self.sources["train"])


def train(run: Run) -> dict | None:
    """Run what is left of the run; the test results, or None if it was asked to stop.

    When a state chunk turns out to be damaged, the checkpoints that it belongs to are given up: the next launch resumes
    from one before them.
    """
    try:
        return _train(run)
    except DamagedChunk as error:
        names = run.state.snapshots_with(error)
        for name in names:
            run.checkpoints.files.condemn(name, str(error))
        raise UserError(f"{error} The checkpoints {', '.join(names) or '(none)'} need it and are given up; start again "
                        "to resume from the one before them.") from error


def _train(run: Run) -> dict | None:
    for line in opening(run):
        log.info(line)
    checkpoint = run.checkpoints.begin_launch()
    position = checkpoint.position if checkpoint else Position()
    if checkpoint:
        check_epochs(run.config, checkpoint, run.method.needs().epochs)
        log.info("resuming from %s", checkpoint.url)
    run.run_log.rewind(position.total_steps, run.checkpoints.hold)
    index = run.sources["train"].index
    run.run_log.write_class_list(index.classes, index.class_ids)
    run.watchdog.beat("checkpoints looked through", building=True)
    if checkpoint is None:
        run.model.cut = cut_of(run.model, run.config, 0, run.method.needs())
        open_cache(run, 0)
        measure_head_norm(run)
    open_state(run, checkpoint)
    for number in range(position.phase, len(run.config.phases)):
        name = run.config.phases[number].name
        run.watchdog.beat(f"phase {name} begun", building=True)
        phase = Phase(run, number, checkpoint)
        run.watchdog.beat(f"phase {name} ready", building=True)
        position = phase.train(position)
        phase.close()
        if run.stop.agreed:
            return None
        _take_best(run, position)
        best_step = position.total_steps if position.best_step is None else position.best_step
        run.method.end_phase(phase.total - (position.total_steps - best_step))
        if number + 1 < len(run.config.phases):
            position = Position(phase=number + 1, total_steps=position.total_steps)
        checkpoint = None
    return _final_test(run, position)


def _take_best(run: Run, position: Position) -> None:
    """The phase's best weights and method state: the next phase and the test start from them."""
    step = position.best_step if position.best_step is not None else position.total_steps
    best = run.checkpoints.at(step)
    run.model.load_state_dict(best.weights())
    run.method.load_state(load_method_state(best))
    run.state.restore(best.name)


def open_state(run: Run, checkpoint: Checkpoint | None) -> None:
    """The store of the method's fields, at the checkpoint's snapshot or at the initial values."""
    url = run.checkpoints.state_url
    if url is None:
        return
    budget = int(run.config.train.state_budget_mb * 2**20)
    run.state = state = SampleState(url, run.method, run.sources["train"], run.world, budget, run.config.seed,
                                    checkpoint.name if checkpoint else None, run.checkpoints.hold.launch,
                                    own=run.config.train.state_url is None)
    # Snapshots after the checkpoint belong to steps that will be taken again.
    names = [entry.name for entry in state.store.snapshots()]
    state.collect([name for name in names if checkpoint and name <= checkpoint.name])
    run.world.barrier()


def _final_test(run: Run, position: Position) -> dict:
    results: dict = {"val_map_skip_empty": position.best_score, "best_step": position.best_step}
    for name in ("val", "test"):
        if name in run.sources:
            result = evaluate(run.model, run.sources[name], run.config, run.world, run.watchdog, name,
                              run.cache.evaluation)
            results[name] = result.summary()
            log.info("%s with the best epoch's weights: %s", name, describe(results[name]))
            index = run.sources[name].index
            run.run_log.write_classes(name, result, index.classes, index.class_ids)
    if "held_out" in run.sources:
        results["held_out"] = known = held_out.measure(run, run.model)
        index = run.sources["held_out"].index
        if said := held_out.describe(known, index.kind, len(index.classes)):
            log.info("%s", said)
            log.info("%s", held_out.advice(run.config.folder))
    run.run_log.write("result", position.total_steps, {k: v for k, v in results.get("test", {}).items()})
    return results
