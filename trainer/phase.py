"""One phase of training: its engine, its epochs (loop.py goes through each), evaluation, and the epoch's checkpoint."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from typing import TYPE_CHECKING

import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.stream import EpochStream
from lacuna.trainer import held_out
from lacuna.trainer.cache.phase_cache import cut_of, open_cache
from lacuna.trainer.cache.stream import CachedStream
from lacuna.trainer.checkpoints.checkpoint import Checkpoint, Position, load_method_state
from lacuna.trainer.checkpoints.conversion import load_engine, needs_conversion
from lacuna.trainer.config.durations import to_steps
from lacuna.trainer.engine import BatchSplit, build_engine, zero_stage
from lacuna.trainer.evaluate import describe, evaluate
from lacuna.trainer.fully_labelled import fully_labelled
from lacuna.trainer.head_decay import pull_to_start
from lacuna.trainer.learner import Learner
from lacuna.trainer.loop import train_epoch
from lacuna.trainer.methods.base import EpochStart
from lacuna.trainer.mixing import Mixer
from lacuna.trainer.running_sums import RunningSums
from lacuna.trainer.scored_samples import scored
from lacuna.trainer.training_data import epoch_plan

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run

log = logging.getLogger("lacuna")


class Phase:
    """One optimisation stage: its engine, weight EMA and epoch plans."""

    def __init__(self, run: Run, number: int, checkpoint: Checkpoint | None):
        self.run, self.number, self.config = run, number, run.config.phases[number]
        world, train_config = run.world, run.config.train
        self.zero_stage = zero_stage(run.config, self.config)
        if checkpoint and checkpoint.zero_stage != self.zero_stage:
            raise UserError(f"train.deepspeed asks for ZeRO stage {self.zero_stage}, but {checkpoint.url} was "
                            f"written with stage {checkpoint.zero_stage}. Resume with that stage.")
        split = BatchSplit.of(self.config.batch, train_config.micro_batch, world.size)
        universal = checkpoint is not None and needs_conversion(checkpoint, world)
        if universal and checkpoint and self.config.optimizer == "sgd":
            raise UserError(f"{checkpoint.url} was written by {checkpoint.world} ranks with ZeRO stage "
                            f"{self.zero_stage} and SGD; DeepSpeed converts only Adam's state to other worlds. "
                            f"Resume with {checkpoint.world} ranks, or start runs that shall change with zero0.")
        self.engine, self.base_lr = build_engine(run.model, run.config, self.config, world, universal)
        run.model.cut = cut_of(run.model, run.config, number, run.method.needs())
        self.learner = Learner(run, self.engine, split, pull_to_start(run, number))
        self.ema = copy.deepcopy(run.model).eval() if train_config.ema_decay else None
        if checkpoint:
            load_engine(self.engine, checkpoint, world, run.checkpoints.folder.remote)
            run.method.load_state(load_method_state(checkpoint))
            if self.ema is not None:
                self.ema.load_state_dict(checkpoint.weights())
        self.cache = open_cache(run, number)
        if text := self.cache.describe():
            log.info("phase %r: %s", self.config.name, text)
        source = run.sources["train"]
        self.plans = [epoch_plan(run.config, source, number, epoch) for epoch in range(self.config.epochs)]
        self.steps_before = [0, *itertools.accumulate(plan.steps for plan in self.plans)]  # every epoch of the phase
        self.total = self.steps_before[-1]
        self.warmup = to_steps(self.config.warmup, self.plans[0].steps, self.total)
        if world.main and source.counts.sum() < 0.9 * self.config.batch * self.plans[0].steps:
            log.warning("phase %r: global batches hold %.0f samples on average, not %d, because data.streams = %d is "
                        "too many for %d shards; use fewer streams or make more shards", self.config.name,
                        source.counts.sum() / self.plans[0].steps, self.config.batch, run.config.data.streams,
                        len(source.index.shards))
        self.epochs_before = sum(phase.epochs for phase in run.config.phases[:number])
        self.sums = RunningSums(world.device)
        self.fully_labelled = fully_labelled(run, number)
        self.mixer = Mixer(run.config, number)

    def steps_after(self, epoch: int) -> int:
        """Steps of the run that follow those of an epoch."""
        return self.total - self.steps_before[epoch + 1] + sum(self.run.steps[self.number + 1 :])

    def train(self, position: Position) -> Position:
        """From the given position to the end of the phase (or the stop); the position reached."""
        if position.epoch_sums:
            self.sums.restore(position.epoch_sums, self.run.world)
        last = self.run.config.train.stop_after
        for epoch in range(position.epoch, self.config.epochs):
            if 0 < last <= self.epochs_before + epoch:
                self.run.stop.agreed = True
                break
            if position.step == 0:
                self.run.method.begin_epoch(self.epoch_start(epoch))
                self.sums.begin_epoch()
            position = train_epoch(self, position)
            if not self.run.stop.agreed:
                position = self._end_epoch(position)
            if self.run.stop.agreed:
                break
        return position

    def epoch_start(self, epoch: int) -> EpochStart:
        run, overall = self.run, self.epochs_before + epoch
        return EpochStart(self.number, epoch, self.config.epochs, overall, run.world, run.state,
                          lambda: scored(run, self.plans[epoch], overall))

    def stream(self, plan: EpochPlan, position: Position) -> EpochStream | CachedStream:
        return self.cache.training(plan, position.step, self.epochs_before + position.epoch)

    def _end_epoch(self, position: Position) -> Position:
        """Evaluate, remember the best, and write the epoch's checkpoint."""
        run = self.run
        run.state.end_epoch()
        loss, means = self.sums.epoch(run.world, self.plans[position.epoch].steps)
        values: dict = {"phase": self.config.name, "epoch": position.epoch, "loss": loss,
                        "bad": self.sums.bad_samples, **means}
        best = position.best_score
        last = position.epoch + 1 == self.config.epochs
        summary: dict = {}
        due = (position.epoch + 1) % run.config.train.eval_every == 0 or last
        if due and {"val", "held_out"} & run.sources.keys() and run.config.model.batchnorm == "local":
            run.world.share_buffers(run.model)  # the statistics that the checkpoint will hold
        if due and "val" in run.sources:
            result = evaluate(self.ema or run.model, run.sources["val"], run.config, run.world, run.watchdog, "val",
                              self.cache.evaluation)
            summary = result.summary()
            values |= {f"val_{key}": value for key, value in summary.items()}
            if best is None or summary["map_skip_empty"] > best:
                position = position.advanced(best_score=summary["map_skip_empty"], best_step=position.total_steps)
                index = run.sources["val"].index
                run.run_log.write_classes("val", result, index.classes, index.class_ids)
        shown = ", val " + describe(summary) if summary else ""
        if due and "held_out" in run.sources:
            known = held_out.measure(run, self.ema or run.model)
            values |= {f"held_out_{key}": value for key, value in known.items()}
            shown += "; " + held_out.describe(known, run.sources["train"].index.kind, run.sources["train"].classes)
        log.info("%s epoch %d/%d: loss %.4f%s", self.config.name, position.epoch + 1, self.config.epochs, loss, shown)
        run.run_log.write("epoch", position.total_steps, values)
        position = position.advanced(epoch=position.epoch + 1, step=0, epoch_sums={})
        self.save(position)
        run.stop.agreed = run.world.sum_counts(run.stop.asked)[0] > 0
        return position

    def save(self, position: Position) -> None:
        parts = {f"{rank}": sums for rank, sums in enumerate(self.run.world.gather(self.sums.to_dict()))}
        if not all(math.isfinite(number) for part in parts.values() for number in
                   (part["interval_loss"], part["epoch_loss"], *part["means"])):
            raise UserError(f"the loss is not finite at step {position.total_steps}, so no checkpoint is written: "
                            f"lower the lr of phase {self.config.name!r} or set train.clip_norm, and start again.")
        position = position.advanced(epoch_sums=parts)
        self.cache.spill()
        self.run.checkpoints.save(self.engine, self.ema, self.run.method.state(), position, self.zero_stage,
                                  self.run.state)
        self.run.watchdog.beat("checkpoint")

    def average_weights(self) -> None:
        if self.ema is not None:
            update_ema(self.ema, self.run.model, self.run.config.train.ema_decay)

    def close(self) -> None:
        self.engine.destroy()


def update_ema(ema: torch.nn.Module, model: torch.nn.Module, decay: float) -> None:
    with torch.no_grad():
        # One kernel for many tensors where the device has it.
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
        if buffers := list(ema.buffers()):
            torch._foreach_copy_(buffers, list(model.buffers()))
